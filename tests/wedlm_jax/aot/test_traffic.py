"""Bytes through main memory, of small programs written out."""

import textwrap

import pytest

from wedlm_jax.aot.cost import program_cost

LAYER, STACK, ROW = 8 * 8 * 4, 6 * 8 * 8 * 4, 8 * 4


def traffic(text):
    return program_cost(textwrap.dedent(text)).hbm_bytes


def test_a_fusion_reads_its_operands_and_writes_its_result_once():
    text = """
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
    # What is used twice inside is still read once.
    assert traffic(text) == LAYER + ROW + LAYER


def test_a_loop_over_layers_reads_each_layer_once_not_the_stack():
    text = """
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
    counter = 6 * 4
    assert traffic(text) == 2 * STACK + counter


def test_an_update_in_place_writes_the_update_alone():
    text = """
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
    assert traffic(text) == LAYER + 4 + LAYER


@pytest.mark.parametrize(("space", "expected"), [("", 2 * LAYER), ("S(1)", LAYER)])
def test_what_lies_in_the_chips_own_memory_is_free(space, expected):
    text = f"""
    ENTRY %main (a: f32[8,8]) -> f32[8,8] {{
      %a = f32[8,8]{{1,0}} parameter(0)
      ROOT %s = f32[8,8]{{1,0:T(8,128){space}}} sine(%a)
    }}
    """
    assert traffic(text) == expected


@pytest.mark.parametrize(("space", "times"), [("", 2), ("S(1)", 1)])
def test_a_slice_that_is_under_way_counts_once_and_not_the_whole(space, times):
    text = f"""
    ENTRY %main (a: f32[6,8,8]) -> f32[1,8,8] {{
      %a = f32[6,8,8]{{2,1,0}} parameter(0)
      %s = ((f32[6,8,8]{{2,1,0}}), f32[1,8,8]{{2,1,0:T(8,128){space}}}, s32[]{{:S(2)}}) \
slice-start(%a), slice={{[0:1], [0:8], [0:8]}}
      ROOT %d = f32[1,8,8]{{2,1,0:T(8,128){space}}} slice-done(%s)
    }}
    """
    assert traffic(text) == times * LAYER


def test_a_kernel_that_says_what_it_moves_is_believed():
    """It may read a layer of a stack that it takes whole."""
    text = """
    ENTRY %main (a: f32[6,8,8]) -> f32[8,8] {
      %a = f32[6,8,8]{2,1,0} parameter(0)
      ROOT %k = f32[8,8]{1,0} custom-call(%a), custom_call_target="kernel", backend_config=SAID
    }
    """
    said = (
        '{"custom_call_config":{"cost_estimate":{"flops":"9","bytes_accessed":"512"},"more":"8"}}'
    )
    assert traffic(text.replace("SAID", said)) == 512
    assert traffic(text.replace("SAID", "{}")) == STACK + LAYER


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


def test_of_a_conditional_all_branches_count():
    """The last reads an eighth of what it is given."""
    assert program_cost(BRANCHES).hbm_bytes == 2 * ROW + 2 * ROW


def test_collectives_between_slices_are_told_apart():
    text = """
    ENTRY %main (a: f32[8]) -> f32[8] {
      %a = f32[8]{0} parameter(0)
      %g = f32[16]{0} all-gather(%a), replica_groups=[2,2]<=[4], dimensions={0}
      %t = token[] after-all()
      %s = (f32[8]{0}, u32[], token[]) send(%a, %t), channel_id=4, is_host_transfer=true, \
frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
      ROOT %r = f32[8]{0} add(%a, %a)
    }
    """
    cost = program_cost(textwrap.dedent(text), slices=2)
    assert cost.sent_bytes == 16 * 4 // 2
    assert cost.slice_bytes == 8 * 4
    assert cost.collective_count == {"all-gather": 1, "all-reduce between slices": 1}


def test_what_runs_on_another_core_ends_with_its_name():
    text = """
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
    assert traffic(text) == 4 * LAYER
