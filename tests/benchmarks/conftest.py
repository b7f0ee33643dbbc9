"""Programs that compile soon."""

from tests.infer.bench.conftest import few_sizes as few_sizes
