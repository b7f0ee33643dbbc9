"""Costs read from compiled programs are those worked out by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from wedlm_jax.aot.cost import group_size, program_cost


def cost_of(function, *arguments):
    return program_cost(jax.jit(function).lower(*arguments).compile().as_text())


def test_a_product_costs_two_flops_an_inner_step():
    x, y = jnp.ones((5, 7)), jnp.ones((7, 3))
    assert cost_of(jnp.matmul, x, y).dot_flops == 2 * 5 * 7 * 3
    x, y = jnp.ones((4, 64, 96)), jnp.ones((4, 96, 32))
    assert cost_of(jnp.matmul, x, y).dot_flops == 2 * 4 * 64 * 96 * 32


def test_loops_count_as_often_as_they_run_within_each_other_too():
    x = jnp.ones((64, 64))

    def outer(x, _):
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y @ y), x), None

    cost = cost_of(lambda x: jax.lax.scan(outer, x, None, length=5)[0], x)
    assert cost.dot_flops == 5 * 3 * 2 * 64**3
    assert cost.unknown_loops == 0


def test_a_loop_of_unknown_length_is_counted_once_and_said():
    x = jnp.ones((64, 64))
    cost = cost_of(
        lambda x: jax.lax.while_loop(lambda y: y[0, 0] < 9.0, lambda y: jnp.tanh(y @ y), x), x
    )
    assert cost.unknown_loops == 1
    assert cost.dot_flops == 2 * 64**3


def test_collectives_are_counted_by_kind_and_bytes():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = NamedSharding(mesh, P("x"))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=sharded)

    def gather_in_a_loop(x):
        def body(total, _):
            whole = jax.lax.with_sharding_constraint(jnp.sin(total), NamedSharding(mesh, P()))
            return jax.lax.with_sharding_constraint(whole * 2.0, sharded), None

        return jax.lax.scan(body, x, None, length=3)[0]

    cost = cost_of(gather_in_a_loop, x)
    assert cost.collective_count == {"all-gather": 3}
    assert cost.collective_bytes == {"all-gather": 3 * 64 * 32 * 4}


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        program_cost("nothing of the sort")


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
def test_the_first_group_is_counted(attributes, size):
    assert group_size(attributes, 8) == size
