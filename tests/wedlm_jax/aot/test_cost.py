"""Costs read from compiled programs, and from small ones written out, are those worked out by
hand."""

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


def nested(x):
    def outer(x, _):
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y @ y), x), None

    return jax.lax.scan(outer, x, None, length=5)[0]


def of_unknown_length(x):
    return jax.lax.while_loop(lambda y: y[0, 0] < 9.0, lambda y: jnp.tanh(y @ y), x)


@pytest.mark.parametrize(("loop", "runs"), [(nested, 15), (of_unknown_length, 1)])
def test_loops_count_as_often_as_they_run_and_once_if_that_is_unknown(loop, runs):
    assert cost_of(loop, jnp.ones((64, 64))).dot_flops == runs * 2 * 64**3


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


# --- programs written out --------------------------------------------------------------------

LAYER, STACK, ROW = 8 * 8 * 4, 6 * 8 * 8 * 4, 8 * 4

FUSION = """
%fused (p0: f32[8,8], p1: f32[8]) -> f32[8,8] {
  %p0 = f32[8,8]{1,0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  %wide = f32[8,8]{1,0} broadcast(%p1), dimensions={1}
  %twice = f32[8,8]{1,0} add(%p0, %p0)
  ROOT %sum = f32[8,8]{1,0} add(%twice, %wide)
}

ENTRY %main (a: f32[8,8], b: f32[8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8]{0} parameter(1)
  ROOT %f = f32[8,8]{1,0} fusion(%a, %b), kind=kLoop, calls=%fused
}
"""

LOOP = """
%fused (p0: f32[6,8,8], p1: s32[]) -> f32[8,8] {
  %p0 = f32[6,8,8]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = f32[1,8,8]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,8}
  ROOT %flat = f32[8,8]{1,0} bitcast(%cut)
}

%body (state: (s32[], f32[6,8,8])) -> (s32[], f32[6,8,8]) {
  %state = (s32[], f32[6,8,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = f32[6,8,8]{2,1,0} get-tuple-element(%state), index=1
  %layer = f32[8,8]{1,0} fusion(%stack, %i), kind=kLoop, calls=%fused
  ROOT %next = (s32[], f32[6,8,8]{2,1,0}) tuple(%i, %stack)
}

%condition (state: (s32[], f32[6,8,8])) -> pred[] {
  %state.1 = (s32[], f32[6,8,8]{2,1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (a: (s32[], f32[6,8,8])) -> (s32[], f32[6,8,8]) {
  %a = (s32[], f32[6,8,8]{2,1,0}) parameter(0)
  ROOT %w = (s32[], f32[6,8,8]{2,1,0}) while(%a), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"6"}}
}
"""

UPDATE = """
%fused (p0: f32[6,8,8], p1: f32[1,8,8], p2: s32[]) -> f32[6,8,8] {
  %p0 = f32[6,8,8]{2,1,0} parameter(0)
  %p1 = f32[1,8,8]{2,1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[6,8,8]{2,1,0} dynamic-update-slice(%p0, %p1, %p2, %zero, %zero)
}

ENTRY %main (a: f32[6,8,8], b: f32[1,8,8], i: s32[]) -> f32[6,8,8] {
  %a = f32[6,8,8]{2,1,0} parameter(0)
  %b = f32[1,8,8]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[6,8,8]{2,1,0} fusion(%a, %b, %i), kind=kLoop, calls=%fused
}
"""

SINE = """
ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %s = f32[8,8]{1,0:T(8,128)INSERTED} sine(%a)
}
"""

SLICE = """
ENTRY %main (a: f32[6,8,8]) -> f32[1,8,8] {
  %a = f32[6,8,8]{2,1,0} parameter(0)
  %s = ((f32[6,8,8]{2,1,0}), f32[1,8,8]{2,1,0:T(8,128)INSERTED}, s32[]{:S(2)}) \
slice-start(%a), slice={[0:1], [0:8], [0:8]}
  ROOT %d = f32[1,8,8]{2,1,0:T(8,128)INSERTED} slice-done(%s)
}
"""

KERNEL = """
ENTRY %main (a: f32[6,8,8]) -> f32[8,8] {
  %a = f32[6,8,8]{2,1,0} parameter(0)
  ROOT %k = f32[8,8]{1,0} custom-call(%a), custom_call_target="kernel", backend_config=INSERTED
}
"""
DECLARED = (
    '{"custom_call_config":{"cost_estimate":{"flops":"9","bytes_accessed":"512"},"more":"8"}}'
)

BRANCHES = """
%small (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} sine(%x)
}

%large (y: f32[8,8]) -> f32[8] {
  %y = f32[8,8]{1,0} parameter(0)
  ROOT %s = f32[8]{0} slice(%y), slice={[0:1], [0:8]}
}

ENTRY %main (i: s32[], a: f32[8], b: f32[8,8]) -> f32[8] {
  %i = s32[] parameter(0)
  %a = f32[8]{0} parameter(1)
  %b = f32[8,8]{1,0} parameter(2)
  ROOT %c = f32[8]{0} conditional(%i, %a, %b), branch_computations={%small, %large}
}
"""

OTHER_CORE = """
%moved (p0: f32[8,8]) -> f32[8,8] {
  %p0 = f32[8,8]{0,1} parameter(0)
  ROOT %copy = f32[8,8]{1,0} copy(%p0)
}, execution_thread="sparsecore"

%fused (p1: f32[8,8]) -> f32[8,8] {
  %p1 = f32[8,8]{1,0} parameter(0)
  ROOT %twice = f32[8,8]{1,0} add(%p1, %p1)
}

ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{0,1} parameter(0)
  %b = f32[8,8]{1,0} call(%a), to_apply=%moved
  ROOT %f = f32[8,8]{1,0} fusion(%b), kind=kLoop, calls=%fused
}
"""

SEND = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %g = f32[16]{0} all-gather(%a), replica_groups=[2,2]<=[4], dimensions={0}
  %t = token[] after-all()
  %s = (f32[8]{0}, u32[], token[]) send(%a, %t), channel_id=4, is_host_transfer=true, \
frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  ROOT %r = f32[8]{0} add(%a, %a)
}
"""


@pytest.mark.parametrize(
    ("program", "inserted", "expected"),
    [
        # What is used twice inside is still read once.
        pytest.param(FUSION, "", LAYER + ROW + LAYER, id="each operand once"),
        pytest.param(LOOP, "", 2 * STACK + 6 * 4, id="each layer once, not the stack"),
        pytest.param(UPDATE, "", LAYER + 4 + LAYER, id="an update in place alone"),
        pytest.param(SINE, "", 2 * LAYER, id="main memory"),
        pytest.param(SINE, "S(1)", LAYER, id="the chip's own memory is free"),
        pytest.param(SLICE, "", 2 * LAYER, id="a slice under way, not the whole"),
        pytest.param(SLICE, "S(1)", LAYER, id="a slice under way to the chip's own memory"),
        # It may read a layer of a stack that it takes whole.
        pytest.param(KERNEL, DECLARED, 512, id="what a kernel declares"),
        pytest.param(KERNEL, "{}", STACK + LAYER, id="a kernel that declares nothing"),
        # The last reads an eighth of what it is given.
        pytest.param(BRANCHES, "", 2 * ROW + 2 * ROW, id="all branches"),
        pytest.param(OTHER_CORE, "", 4 * LAYER, id="a computation on another core"),
    ],
)
def test_bytes_through_main_memory(program, inserted, expected):
    assert program_cost(program.replace("INSERTED", inserted)).hbm_bytes == expected


def test_collectives_between_slices_are_told_apart():
    cost = program_cost(SEND, slices=2)
    assert cost.sent_bytes == 16 * 4 // 2
    assert cost.slice_bytes == 8 * 4
    assert cost.collective_count == {"all-gather": 1, "all-reduce between slices": 1}
