"""`wedlm evaluate --tasks` and lm_eval's own command, on tasks that lie here."""

import json
import shutil
import sys

import pytest

from infer.evaluate import main
from infer.harness.__main__ import main as command_of_lm_eval
from tests.examples.child import run_python
from tests.infer.harness.conftest import TEXTS
from wedlm_jax.errors import InputError
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams


def evaluated(tmp_path, *arguments):
    output = tmp_path / "results.json"
    assert main([*map(str, arguments), "--output", str(output)]) == 0
    return json.loads(output.read_text(encoding="utf-8"))


def test_a_task_of_each_kind(checkpoint, tasks, tmp_path, model, one_at_a_time, capsys):
    results = evaluated(
        tmp_path,
        *("--model", checkpoint, "--window-size", 4, "--max-model-len", 64, "--batch-size", 4),
        *("--tasks", "write,choose", tasks / "read.yaml", "--include-path", tasks),
        *("--log-samples", "--mode", "paper"),
    )
    said = [sample["resps"][0][0] for sample in results["samples"]["write"]]
    params = SamplingParams(mode="paper", max_tokens=12, stop=("\n",))
    alone = [one_at_a_time.generate(text, params)[0] for text in TEXTS]
    assert said == [one.text for one in alone]
    assert results["results"]["write"]["exact_match,none"] == 0
    chosen = [s["filtered_resps"] for s in results["samples"]["choose"]]
    right = [max(range(3), key=lambda i: float(some[i][0])) == 1 for some in chosen]
    assert results["results"]["choose"]["acc,none"] == sum(right) / len(TEXTS)
    assert results["results"]["read"]["word_perplexity,none"] > 1
    config, tokens = results["config"], sum(len(one.token_ids) for one in alone)
    assert (config["mode"], config["window_size"]) == ("paper", 4)
    assert config["tokens_per_forward"] == tokens / sum(one.num_forwards for one in alone)
    assert config["p_cache"] == tokens / sum(one.num_token_instances for one in alone)
    assert config["tokens_per_second"] > 0
    printed = capsys.readouterr()
    assert "exact_match" in printed.out
    assert "tokens per forward" in printed.err


@pytest.mark.full
def test_answers_may_be_bounded_and_documents_left_out(checkpoint, tasks, tmp_path):
    results = evaluated(
        tmp_path,
        *("--model", checkpoint, "--tasks", "write", "--include-path", tasks, "--limit", 2),
        *("--window-size", 2, "--max-tokens", 3, "--log-samples", "--apply-chat-template"),
    )
    samples = results["samples"]["write"]
    assert len(samples) == 2
    llm = LLM(checkpoint, window_size=2)
    for sample in samples:
        chat = [{"role": "user", "content": sample["doc"]["text"]}]
        params = SamplingParams(max_tokens=3, stop=("\n",))
        assert sample["resps"][0][0] == llm.chat([chat], params)[0].text


BAD_OPTIONS = {
    "--tasks TASKS/none.yaml": "none.yaml: no such file",
    "--tasks write --include-path TASKS/none": "no such folder",
    "--tasks TASKS/broken.yaml": "cannot load .*broken.yaml",
    "--tasks write --include-path TASKS --model no/such/dir": "no/such/dir",
    "--tasks write --include-path TASKS --entropy-threshold 0.2 0.4": "expected one",
}


@pytest.mark.parametrize(
    "options",
    [
        BAD_OPTIONS,
        pytest.param(
            {"--tasks writ --include-path TASKS": "no task 'writ'; did you mean 'write'"},
            marks=pytest.mark.full,  # lm_eval reads all its tasks
        ),
    ],
    ids=["files", "a name"],
)
def test_what_cannot_be_evaluated_is_refused_in_a_sentence(checkpoint, tasks, tmp_path, options):
    shutil.copytree(tasks, here := tmp_path / "tasks")
    text = (tasks / "write.yaml").read_text(encoding="utf-8")
    text = text.replace("task: write", "task: broken").replace("texts.jsonl", "none.jsonl")
    (here / "broken.yaml").write_text(text, encoding="utf-8")
    for arguments, sentence in options.items():
        words = arguments.replace("TASKS", str(here)).split()
        if "--model" not in words:
            words += ["--model", str(checkpoint)]
        with pytest.raises(InputError, match=sentence) as refused:
            main(words)
        assert "\n" not in str(refused.value)


@pytest.mark.full
@pytest.mark.parametrize("problems", [12, 164])
def test_human_eval_is_answered_once_a_problem_and_in_company_as_alone(tmp_path, problems):
    """By the embedded model, which knows no Python; nothing is run."""
    arguments = ("--tasks", "human_eval", "--limit", problems, "--max-tokens", 16, "--log-samples")
    together = evaluated(tmp_path, *arguments, "--batch-size", 16)
    alone = evaluated(tmp_path, *arguments, "--batch-size", 1)
    answers = {s["doc"]["task_id"]: s["resps"] for s in together["samples"]["human_eval"]}
    assert len(answers) == len(together["samples"]["human_eval"]) == problems
    assert all(len(resps) == len(resps[0]) == 1 for resps in answers.values())
    assert len({resps[0][0] for resps in answers.values()}) > problems / 8
    assert answers == {s["doc"]["task_id"]: s["resps"] for s in alone["samples"]["human_eval"]}
    assert together["results"]["human_eval"].keys() >= {"parses,none"}
    assert "pass@1,none" not in together["results"]["human_eval"]


@pytest.mark.full
def test_programs_are_run_when_it_is_asked_for(checkpoint, tmp_path):
    results = evaluated(
        tmp_path,
        *("--model", checkpoint, "--window-size", 2, "--max-model-len", 320, "--max-tokens", 4),
        *("--tasks", "human_eval", "human_eval_chat", "--limit", 2, "--run-code"),
        "--apply-chat-template",
    )
    for task in ("human_eval", "human_eval_chat"):
        assert results["results"][task]["pass@1,none"] == 0
        assert results["n-samples"][task]["effective"] == 2


@pytest.mark.full
def test_the_command_of_lm_eval_knows_the_model(checkpoint, tasks, tmp_path, monkeypatch):
    arguments = (
        *("--model", "wedlm", "--model_args", f"pretrained={checkpoint},window_size=2,mode=paper"),
        *("--tasks", "write", "--include_path", tasks, "--batch_size", "auto"),
        *("--output_path", tmp_path / "out", "--log_samples"),
    )
    monkeypatch.setattr(sys, "argv", [])  # which it sets
    command_of_lm_eval(list(map(str, arguments)))
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text(encoding="utf-8"))
    assert results["config"]["mode"] == "paper"
    assert results["n-samples"]["write"]["effective"] == len(TEXTS)


@pytest.mark.full
def test_the_command_of_lm_eval_says_what_it_does_not_know(checkpoint, tasks):
    """In a process of its own; `tests/infer/harness/test_model.py` has every such sentence."""
    command = ["-m", "infer.harness", "--model", "wedlm", "--tasks", "write", "--model_args"]
    wrong = f"pretrained={checkpoint},windowsize=2"
    done = run_python(*command, wrong, "--include_path", tasks)
    assert done.returncode == 2
    assert "unknown model argument 'windowsize'" in done.stderr
    assert "Traceback" not in done.stderr
