"""Recipes on pods: which programs are compiled, and what is told of those that are not."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks import pods
from benchmarks.pods import PodStep, compare_pods, pod_table
from tests.train.test_compile_only import STEP
from train.recipe.config import load_config
from wedlm_jax.errors import InputError

RECIPE = str(Path(__file__).parents[2] / "configs" / "wedlm_8b.yaml")


def test_every_pod_takes_as_many_tokens_a_slice(monkeypatch):
    compiled = []

    def compile_step(config, topology):
        sizes = config.row_length, config.rows, config.accumulation
        compiled.append((topology, *sizes, *dataclasses.astuple(config.mesh)))
        if config.row_length == 8192:
            raise InputError("it does not fit")
        # As `loss.remat: auto` may cut it.
        return dataclasses.replace(STEP, rows=config.rows // 2, accumulation=2)

    monkeypatch.setattr(pods, "compile_step", compile_step)
    found = list(
        compare_pods([RECIPE], ["v5p:4x4x4", "v5p:8x8x8*2"], [4096, 8192], {"mesh.tensor": 2})
    )
    assert compiled == [
        ("v5p:4x4x4", 4096, 512, 1, 1, -1, 2, 1),
        ("v5p:4x4x4", 8192, 256, 1, 1, -1, 2, 1),
        ("v5p:8x8x8*2", 4096, 1024, 1, 2, -1, 2, 1),
        ("v5p:8x8x8*2", 8192, 512, 1, 2, -1, 2, 1),
    ]
    assert [(pod.accumulation, pod.error) for pod in found] == [
        (2, None),
        (1, "it does not fit"),
    ] * 2
    assert {(pod.recipe, pod.rows * pod.accumulation * pod.row_length) for pod in found} == {
        ("wedlm_8b", 512 * 4096),
        ("wedlm_8b", 1024 * 4096),
    }


@pytest.mark.parametrize(
    ("recipe", "topology", "says"),
    [("no.yaml", "v5p:4x4x4", "no.yaml"), (RECIPE, "v5p-128", "v5p-128")],
)
def test_nothing_is_compiled_where_one_cannot_be(monkeypatch, recipe, topology, says):
    monkeypatch.setattr(pods, "compile_step", lambda *_: pytest.fail("compiled"))
    with pytest.raises(InputError, match=says):
        list(compare_pods([RECIPE, recipe], ["v5p:4x4x4", topology], [4096], {}))


def test_the_table_is_markdown():
    pods = [
        PodStep("wedlm_8b", "v5p:2x2x1", 4096, 64, 8, STEP),
        PodStep("wedlm_7b", "v5e:2x4", 4096, 8, 64, None, "it does not fit"),
    ]
    heads, rule, whole, refused = pod_table(pods).splitlines()
    assert heads.startswith("| recipe | topology | mesh | L |")
    assert set(rule) == set("| -")
    shown = "| wedlm_8b | v5p:2x2x1 | fsdp 4 | 4,096 | 64 × 8 | gate | 90.0 of 100 GiB | 10% |"
    assert whole.startswith(shown)
    assert all(f"| {cell} |" in whole for cell in ("2.00 s (compute)", "3.50 s"))
    assert "| it does not fit |" in refused


def test_the_recipe_says_what_the_table_says_of_its_pod():
    root = Path(__file__).parents[2]
    table = (root / "docs" / "compile-report.md").read_text(encoding="utf-8")
    [line] = [x for x in table.splitlines() if x.startswith("| wedlm_8b | v5p:4x4x8 |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    rows, policy, peak, step, bound, expected = (cells[n] for n in (3, 4, 5, 10, 12, 13))
    recipe = (root / "configs" / "wedlm_8b.yaml").read_text(encoding="utf-8")
    said = " ".join(x.lstrip("# ") for x in recipe.splitlines() if x.startswith("#"))
    assert f"{rows} rows with {policy}, {peak}" in said
    assert (
        f"{step.split(' (')[0]} per step at best, {bound} of the peak, {expected} expected" in said
    )
    # The step's rows are cut as the recipe's are by `loss.remat: auto`.
    config = load_config(RECIPE)
    micro_rows, accumulation = map(int, rows.split(" × "))
    assert config.rows * config.accumulation == micro_rows * accumulation
