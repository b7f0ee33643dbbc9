"""Losses of runs, drawn side by side."""

import json

from docs.losses import main


def test_each_run_is_a_line_of_each_panel(tmp_path, capsys):
    for name, offset in (("one", 0.0), ("two", 1.0)):
        (tmp_path / name).mkdir()
        lines = [{"step": n, "mlm_loss": 9 - n + offset, "ar_loss": 1.0} for n in range(1, 13)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    plot = tmp_path / "out.svg"
    assert main([str(tmp_path / "one"), str(tmp_path / "two"), "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert "one: masked tokens 1.5000" in said
    assert "two: masked tokens 2.5000" in said
    drawn = plot.read_text()
    assert all(text in drawn for text in (">one<", ">two<", "masked tokens", "next tokens"))
