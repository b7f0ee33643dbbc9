"""Programs small enough to compile quickly."""

from tests.infer.bench.conftest import few_sizes as few_sizes
