import dataclasses
import importlib.util
import json

import pytest

from infer.bench import predict
from infer.bench.predict import Prediction, predicted_table
from tests.examples.child import run_python
from tests.infer.test_compile_only import MODEL
from wedlm_jax.config import config_to_hf


def test_windows_pay_from_the_cost_of_their_forward_on():
    ar = Prediction(64, 0, 64, 3.7, "memory", 6.0)
    masks = dataclasses.replace(ar, window=16, tokens=1088, bound="compute", milliseconds=24.0)
    table = predicted_table("v5e:2x4", [ar, masks])
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["AR", "W = 16"]
    assert cells[5] == ["1.00", "4.00"]
    assert cells[6] == ["10,667", ""]
    assert "predicted, not run" in table.caption


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_a_small_model_is_predicted_for_a_real_topology(tmp_path):
    """In a process of its own: the compiler's library wants one to itself. A replica has at least
    one sequence."""
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(MODEL)), encoding="utf-8")
    output = tmp_path / "predicted.json"
    command = f"-m wedlm_jax bench --predict v5e:2x4 --model {tmp_path} --batch-size 1 2"
    command += " --backup-masks 8"
    done = run_python(*command.split(), "--output", output)
    assert done.returncode == 0, done.stderr
    ar, masks = json.loads(output.read_text())["predictions"]
    assert (ar["sequences"], ar["window"], ar["tokens"]) == (2, 0, 1)
    assert (masks["sequences"], masks["window"], masks["tokens"]) == (2, 16, 25)
    assert ar["milliseconds"] < masks["milliseconds"] < 25 * ar["milliseconds"]
    assert 0 < ar["peak_gib"] <= masks["peak_gib"] < predict.GIB
