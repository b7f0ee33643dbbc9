#!/bin/bash
# A training run under Slurm: one task a node, queued again until it is done.
#
#   sbatch --nodes=32 launch/slurm.sh \
#       wedlm train --config configs/wedlm_8b.yaml --distributed output=/mnt/share/runs/wedlm_8b
#
# Ten minutes before the time limit every task gets SIGTERM, saves its state and ends with 143. So
# that preemption leaves as long, the partition's GraceTime must be as much.
#SBATCH --job-name=wedlm
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@600
set -u

# Where one host is lost, the others would wait for it for ever.
srun --kill-on-bad-exit=1 --wait=600 "$@"
status=$?
restarts=${SLURM_RESTART_COUNT:-0}
case $status in
    0 | 2 | 65) exit "$status" ;; # done, or bad input
esac
if [ "$restarts" -ge "${MAX_RESTARTS:-20}" ]; then
    echo "slurm.sh: status $status; given up after $restarts restarts" >&2
    exit "$status"
fi
echo "slurm.sh: status $status; queued again" >&2
scontrol requeue "$SLURM_JOB_ID"
