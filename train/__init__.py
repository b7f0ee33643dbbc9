"""The training job: data, step, loop, checkpoints, metrics."""
