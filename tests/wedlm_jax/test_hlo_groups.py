"""Groups of devices, in each way a program writes them."""

from __future__ import annotations

import pytest

from wedlm_jax.hlo_groups import group_of


@pytest.mark.parametrize(
    ("attributes", "group"),
    [
        ("channel_id=1, replica_groups={{0,2},{1,3}}, dimensions={0}", [0, 2]),
        ("replica_groups=[2,4]<=[8], use_global_device_ids=true", [0, 1, 2, 3]),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={1}", [0, 4]),
        ("replica_groups=[1,8]<=[2,2,2]T(2,0,1)", [0, 2, 4, 6, 1, 3, 5, 7]),
        ("source_target_pairs={{0,1},{1,2},{3,0}}", [3, 0]),
        ("replica_groups={}, to_apply=%add", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_first_group_is_read(attributes: str, group: list[int]) -> None:
    assert group_of(attributes, 8) == group
