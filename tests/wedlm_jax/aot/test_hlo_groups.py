"""Groups of devices, in each way a program writes them."""

from __future__ import annotations

import pytest

from wedlm_jax.aot.hlo_groups import group_size


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("channel_id=1, replica_groups={{0,2},{1,3}}, dimensions={0}", 2),
        ("replica_groups=[2,4]<=[8], use_global_device_ids=true", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={1}", 2),
        ("replica_groups=mesh['data'=2,'fsdp'=2,'tensor'=3] {'data','tensor'}, x={}", 6),
        ("replica_groups={}, to_apply=%add", 8),
        ("source_target_pairs={{0,1},{1,0}}", 8),
    ],
)
def test_the_first_group_is_counted(attributes: str, size: int) -> None:
    assert group_size(attributes, 8) == size
