"""File jobs: every row back exactly once and in order, whatever stops the job on the way."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from infer.job_fingerprint import folder_digest
from infer.part_file import PartFile
from tests.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint
from wedlm_jax.__main__ import main
from wedlm_jax.engine import Engine
from wedlm_jax.llm import LLM, Completion
from wedlm_jax.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=24)
WORDS = ["the cat", "one two three", "naïve 日本", "12 + 30 = ", "a", "mat", "= 42", "on on on"]
KEYS = ["id", "text", "token_ids", "finish_reason", "num_forwards", "num_token_instances"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, window_size=4, max_batch_size=4)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, so that messages name files without their folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(rows: list[Any], name: str = "in.jsonl") -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    Path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def words(count: int = len(WORDS)) -> list[dict[str, Any]]:
    return [{"prompt": WORDS[i % len(WORDS)]} for i in range(count)]


def run(model: Path, *options: str) -> int:
    files = ["--input", "in.jsonl", "--output", "out.jsonl"]
    shape = ["--window-size", "4", "--max-tokens", "24", "--batch-size", "4"]
    return main(["generate", "--model", str(model), *files, *shape, *options])


def results(name: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_bytes().splitlines()]


def as_row(name: str | int, completion: Completion) -> dict[str, Any]:
    return {"id": name, **dataclasses.asdict(completion)}


# --- rows in, rows out -------------------------------------------------------------------


def test_rows_come_back_in_order_with_their_fields(
    work: Path, model: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    ends = (270, 280, 290)
    write(
        [
            {"prompt": "a"},
            {"id": "ids", "prompt_token_ids": [70, 80, 90]},
            {"id": 77, "messages": conversation},
            {"prompt": WORDS[1], "sampling": {"max_tokens": 5}},
            {"id": "ends", "prompt": "mat", "sampling": {"stop_token_ids": ends}},
            {"id": "one", "prompt": "mat", "sampling": {"entropy_threshold": None}},
            {"prompt": WORDS[2]},
            {"prompt": WORDS[3], "sampling": {"max_tokens": 20}},
        ]
    )
    assert run(model) == 0
    prompts = [
        "a",
        [70, 80, 90],
        llm.chat_prompt(conversation),
        WORDS[1],
        "mat",
        "mat",
        *WORDS[2:4],
    ]
    changes: list[dict[str, Any]] = [
        {}, {}, {}, {"max_tokens": 5}, {"stop_token_ids": ends}, {"entropy_threshold": None},
        {}, {"max_tokens": 20},
    ]  # fmt: skip
    completions = llm.generate(prompts, [dataclasses.replace(GREEDY, **c) for c in changes])
    names = [0, "ids", 77, 3, "ends", "one", 6, 7]
    expected = [as_row(*pair) for pair in zip(names, completions, strict=True)]
    assert results() == expected
    assert all(list(row) == KEYS for row in results())
    assert sorted(os.listdir()) == ["in.jsonl", "out.jsonl"]
    out, err = capsys.readouterr()
    assert out == ""
    tokens = sum(len(row["token_ids"]) for row in expected)
    per_forward = tokens / sum(row["num_forwards"] for row in expected)
    summary = err.splitlines()[-1]
    assert summary.startswith(f"out.jsonl: 8 rows, {tokens} tokens in ")
    assert f"{per_forward:.2f} tokens per forward" in summary
    assert summary.endswith("s of compiling")


def test_command_line_and_row_parameters_combine(work: Path, model: Path, llm: LLM) -> None:
    write([*words(2), {"prompt": WORDS[0], "sampling": {"seed": 3, "top_k": 0}}, *words(1)])
    options = "--temperature 1 --top-k 9 --seed 4294967295 --entropy-threshold 3"
    assert run(model, *options.split()) == 0
    base = SamplingParams(max_tokens=24, temperature=1.0, top_k=9, entropy_threshold=3.0)
    seeds = [2**32 - 1, 0, 3, 2]  # row numbers are added, unless a row names its own
    params = [dataclasses.replace(base, seed=seed) for seed in seeds]
    params[2] = dataclasses.replace(params[2], top_k=0)
    expected = llm.generate([WORDS[0], WORDS[1], WORDS[0], WORDS[0]], params)
    assert results() == [as_row(i, completion) for i, completion in enumerate(expected)]


def test_chat_option_applies_to_texts(work: Path, model: Path) -> None:
    write([{"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}] * 2)
    assert run(model, "--chat") == 0
    first, *others = results()
    assert others == [{**first, "id": i} for i in (1, 2, 3)]


def test_window_of_zero_is_autoregressive(work: Path, model: Path) -> None:
    write(words(4))
    assert run(model, "--window-size", "0") == 0
    for row in results():
        assert row["num_forwards"] == row["num_token_instances"] == len(row["token_ids"])


def test_without_tokenizer_token_ids_in_and_no_text_out(
    work: Path, model: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = write_tiny_checkpoint(work / "bare", tokenizer=False)
    write([{"prompt_token_ids": [70, 80, n]} for n in range(4)])
    assert run(bare) == 0
    completions = llm.generate([[70, 80, n] for n in range(4)], GREEDY)
    assert results() == [
        as_row(i, dataclasses.replace(c, text=None)) for i, c in enumerate(completions)
    ]
    for row in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "hi"}]}):
        write([{"prompt_token_ids": [70]}, row])
        assert run(bare) == 2
        assert "in.jsonl line 2: " in (error := capsys.readouterr().err)
        assert "bare has no tokenizer" in error


@pytest.mark.parametrize(
    "content",
    [
        '{"prompt": "a"}\n{"prompt": "mat"}\n',
        '{"prompt": "a"}\n{"prompt": "mat"}',
        '\ufeff{"prompt": "a"}\r\n\r\n   \n{"prompt": "mat"}\r\n\n',
    ],
)
def test_line_ends_blank_lines_and_a_byte_order_mark(
    work: Path, model: Path, llm: LLM, content: str
) -> None:
    Path("in.jsonl").write_bytes(content.encode("utf-8"))
    assert run(model, "--batch-size", "1") == 0
    expected = [llm.generate(prompt, GREEDY)[0] for prompt in ("a", "mat")]
    assert results() == [as_row(i, completion) for i, completion in enumerate(expected)]


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_no_rows_make_an_empty_output(
    work: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.jsonl").write_text(content)
    assert run(work / "never-loaded") == 0
    assert Path("out.jsonl").read_bytes() == b""
    assert capsys.readouterr().err == "in.jsonl has no rows, and so has out.jsonl now\n"


# --- refusals ----------------------------------------------------------------------------

BAD_LINES = [
    ('{"prompt": "a"', "not valid JSON (Expecting ',' delimiter at column 15)"),
    ("prompt", "not valid JSON (Expecting value at column 1)"),
    ('{"prompt": "a", "sampling": {"top_p": NaN}}', "not valid JSON (NaN is no number there)"),
    ("[" * 100_000, "not JSON that can be read"),
    ('{"prompt": "a", "id": ' + "1" * 5000 + "}", "not JSON that can be read"),
    ('["a"]', 'expected a JSON object, not ["a"]'),
    ('{"prompt": "a", "prompt": "b"}', "key 'prompt' stands there twice"),
    ('{"promt": "a"}', "unknown key 'promt'; did you mean 'prompt'?"),
    ('{"prompt": "a", "xyz": 1}', "unknown key 'xyz'; there are prompt, prompt_token_ids,"),
    ('{"id": 5}', "expected exactly one of prompt, prompt_token_ids, messages; the row has none"),
    ('{"prompt": "a", "messages": []}', "; the row has prompt and messages"),
    ('{"prompt": 5}', "prompt: expected a text, not 5"),
    ('{"prompt": null}', "prompt: expected a text, not null"),
    ('{"prompt": ""}', "the prompt has no tokens; at least one is needed"),
    ('{"prompt": "half \\ud83d"}', "half of a surrogate pair"),
    ('{"prompt_token_ids": "abc"}', 'prompt_token_ids: expected a list of integers, not "abc"'),
    ('{"prompt_token_ids": [1, "2"]}', 'prompt_token_ids: expected a list of integers, not [1, "'),
    ('{"prompt_token_ids": [true]}', "prompt_token_ids: expected a list of integers, not [true]"),
    ('{"prompt_token_ids": []}', "the prompt has no tokens; at least one is needed"),
    ('{"prompt_token_ids": [5, 300]}', f"token id 300 lies outside the vocabulary of {VOCAB_SIZE}"),
    ('{"prompt_token_ids": [-1]}', "token id -1 lies outside the vocabulary"),
    ('{"prompt_token_ids": [4294967297]}', "token id 4294967297 lies outside the vocabulary"),
    ('{"messages": "hello"}', 'messages: expected a list of at least one, not "hello"'),
    ('{"messages": []}', "messages: expected a list of at least one, not []"),
    ('{"messages": ["hello"]}', 'messages[0]: expected an object, not "hello"'),
    ('{"messages": [{"role": "user"}]}', "messages[0]: expected a text as 'content'"),
    ('{"messages": [{"role": 1, "content": ""}]}', "messages[0]: expected a text as 'role'"),
    ('{"prompt": "a", "id": 1.5}', "id: expected a text or an integer, not 1.5"),
    ('{"prompt": "a", "id": null}', "id: expected a text or an integer, not null"),
    ('{"prompt": "a", "id": 0}', "id 0 is that of line 1 already"),
    ('{"prompt": "a", "sampling": 5}', "sampling: expected an object, not 5"),
    ('{"prompt": "a", "sampling": {"temprature": 1}}', "did you mean 'temperature'?"),
    ('{"prompt": "a", "sampling": {"top_p": 1.5}}', "sampling.top_p: expected a number from 0 to"),
    ('{"prompt": "a", "sampling": {"temperature": "hot"}}', "sampling.temperature: expected a num"),
    ('{"prompt": "a", "sampling": {"temperature": 1e999}}', "sampling.temperature: expected a num"),
    ('{"prompt": "a", "sampling": {"max_tokens": 0}}', "sampling.max_tokens: expected an integer"),
    ('{"prompt": "a", "sampling": {"stop": 5}}', "sampling.stop: expected a text or a list"),
    ('{"prompt": "a", "sampling": {"stop": [""]}}', "sampling.stop: expected non-empty strings"),
    ('{"prompt": "a", "sampling": {"stop_token_ids": 5}}', "sampling.stop_token_ids: expected a"),
    ('{"prompt": "a", "sampling": {"stop_token_ids": [300]}}', "stop_token_ids: 300 is outside"),
    ('{"prompt": "a", "sampling": {"max_tokens": 320}}', "exceed max_model_len 320"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_row_is_named_before_anything_runs(
    work: Path, model: Path, line: str, message: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(Engine, "start", lambda *_: pytest.fail("it ran"))
    Path("in.jsonl").write_text(f'{{"prompt": "a"}}\n\n{line}\n', encoding="utf-8")
    assert run(model) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("wedlm generate: in.jsonl line 3: ")
    assert message in err
    assert err.count("\n") == 1
    assert len(err) < 400
    assert os.listdir() == ["in.jsonl"]


def test_each_id_once(work: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write([{"id": "1", "prompt": "a"}, {"prompt": "a"}, {"id": 1, "prompt": "a"}])
    assert run(model) == 2
    assert "in.jsonl line 3: id 1 is that of line 2 already (a row w" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n'.encode("utf-16"), "line 1: expected UTF-8 text, but this is UTF-16"),
        ('{"prompt": "naïve"}\n'.encode("latin-1"), "line 1: expected UTF-8 text, but this is an"),
        (b'{"prompt": "a"}\n{"prompt": "\0"}\n', "line 2: expected UTF-8 text, but this is UTF-16"),
        (b"\x1f\x8b\x08\x00binary", "line 1: expected UTF-8 text"),
    ],
)
def test_files_that_are_no_text(
    work: Path, model: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.jsonl").write_bytes(content)
    assert run(model) == 2
    assert f"in.jsonl {message}" in capsys.readouterr().err
    assert os.listdir() == ["in.jsonl"]


@pytest.mark.parametrize(
    ("input_file", "output_file", "message"),
    [
        ("missing.jsonl", "out.jsonl", "missing.jsonl: no such file"),
        ("folder", "out.jsonl", "folder: expected a JSONL file, but this is a folder"),
        ("in.jsonl", "missing/out.jsonl", "missing/out.jsonl: there is no folder missing"),
        ("in.jsonl", "folder", "folder: not a file that could be replaced"),
        ("in.jsonl", "in.jsonl", "in.jsonl: input and output are the same file"),
        ("in.jsonl", "folder/link.jsonl", "link.jsonl: input and output are the same file"),
        ("a.jsonl.part", "a.jsonl", "a.jsonl.part: input and output are the same file"),
    ],
)
def test_files_that_cannot_be_used(
    work: Path, model: Path, input_file: str, output_file: str, message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write(words())
    write(words(), "a.jsonl.part")
    before = Path("in.jsonl").read_bytes()
    Path("folder").mkdir()
    Path("folder/link.jsonl").symlink_to(work / "in.jsonl")
    assert run(model, "--input", input_file, "--output", output_file) == 2
    assert message in capsys.readouterr().err
    assert Path("in.jsonl").read_bytes() == Path("a.jsonl.part").read_bytes() == before


# --- stopped jobs ------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each batch had that was decoded since."""
    sizes: list[int] = []
    start = Engine.start

    def counting(self: Engine, prompts: Any, params: Any, **options: Any) -> Any:
        sizes.append(len(prompts))
        return start(self, prompts, params, **options)

    monkeypatch.setattr(Engine, "start", counting)
    return sizes


def stop_after(batches: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``error`` strike once so many batches are kept, and then never again."""
    start, left = Engine.start, [batches]

    def failing(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise error
        return start(*arguments, **options)

    monkeypatch.setattr(Engine, "start", failing)


def test_interrupted_job_goes_on(
    work: Path, model: Path, decoded: list[int],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write(words(16))
    assert run(model) == 0
    whole = Path("out.jsonl").read_bytes()
    stop_after(2, KeyboardInterrupt(), monkeypatch)
    decoded.clear()
    capsys.readouterr()
    assert run(model) == 130
    said = capsys.readouterr().err.splitlines()
    kept = "8 of 16 rows kept in out.jsonl.part"
    assert said[-1] == f"interrupted: {kept}; the same command goes on from there"
    assert Path("out.jsonl").read_bytes() == whole, "an earlier output stays until the new is whole"
    Path("out.jsonl").unlink()
    assert decoded == [4, 4]
    # A smaller batch changes no result, so the job is the same.
    assert run(model, "--batch-size", "1") == 0
    assert decoded[2:] == [1] * 8
    assert Path("out.jsonl").read_bytes() == whole
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"going on behind {kept}"
    assert said[-1].startswith("out.jsonl: 16 rows (8 of them from before), ")
    assert sorted(os.listdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    "change",
    [["--max-tokens", "23"], ["--temperature", "0.5"], ["--seed", "1"], ["--stop", "zzz"],
     ["--entropy-threshold", "none"], ["--chat"], ["--dtype", "bfloat16"], "input", "model"],
    ids=str,
)  # fmt: skip
def test_another_job_begins_anew(
    work: Path, model: Path, change: list[str] | str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write(words(8))
    stop_after(1, KeyboardInterrupt(), monkeypatch)
    assert run(model) == 130
    options = change if isinstance(change, list) else []
    if change == "input":
        write([*words(7), {"prompt": "b"}])
    elif change == "model":
        model = Path(shutil.copytree(model, work / "other"))
        raw = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**raw, "rope_theta": 5e5}))
    # The first batch of the new run is the last that this test needs.
    stop_after(0, KeyboardInterrupt(), monkeypatch)
    capsys.readouterr()
    assert run(model, *options) == 130
    held = "out.jsonl.part held 4 rows of another input or other settings; beginning anew"
    assert capsys.readouterr().err.splitlines()[0] == held


def test_checkpoint_may_be_moved_but_not_changed(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / "notes.md").write_text("no part of the model")
    assert folder_digest(copy) == folder_digest(model)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert folder_digest(copy) != folder_digest(model)


def test_large_checkpoints_are_sampled_to_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.job_fingerprint.WHOLE_FILE", 100)
    monkeypatch.setattr("infer.job_fingerprint.SAMPLES", 4)
    monkeypatch.setattr("infer.job_fingerprint.SAMPLE_SIZE", 8)
    path = tmp_path / "model.safetensors"

    def digest(place: int | None) -> str:
        content = bytearray(101)
        if place is not None:
            content[place] = 1
        path.write_bytes(content)
        return folder_digest(tmp_path)

    seen = [place for place in range(101) if digest(place) != digest(None)]
    assert seen == [*range(8), *range(31, 39), *range(62, 70), *range(93, 101)]


def test_memory_that_does_not_suffice(
    work: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(words(8))
    stop_after(1, RuntimeError("RESOURCE_EXHAUSTED: out of memory"), monkeypatch)
    assert run(model) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "not enough memory for 4 rows at a time, try a smaller --batch-size" in error
    assert error.endswith("4 of 8 rows kept in out.jsonl.part")


def test_other_errors_are_not_hidden_and_lose_nothing(
    work: Path, model: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[int]
) -> None:
    write(words(8))
    stop_after(1, RuntimeError("a fault"), monkeypatch)
    with pytest.raises(RuntimeError, match="a fault"):
        run(model)
    assert run(model) == 0
    assert decoded == [4, 4]
    assert [row["id"] for row in results()] == list(range(8))


def test_second_job_on_the_same_output_is_refused(
    work: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(words(4))
    with open("out.jsonl.part", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert run(model) == 2
    assert "out.jsonl.part: another process is writing it" in capsys.readouterr().err


# --- real processes ----------------------------------------------------------------------


def kept_bytes() -> int:
    path = Path("out.jsonl.part")
    return path.stat().st_size if path.exists() else 0


def start_process(model: Path, cache: Path) -> subprocess.Popen[str]:
    """The command in a process of its own, once it has kept rows of its own."""
    before = kept_bytes()
    command = [sys.executable, "-m", "wedlm_jax", "generate", "--model", str(model)]
    command += ["--input", "in.jsonl", "--output", "out.jsonl"]
    command += ["--window-size", "0", "--batch-size", "1", "--max-tokens", "24"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    process = subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell runs in the background ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 300
    while kept_bytes() < before + 1000:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process


@pytest.mark.slow
def test_killed_and_interrupted_processes_lose_nothing(
    work: Path, model: Path, decoded: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    write(words(600))
    cache = tmp_path_factory.mktemp("compiled")
    process = start_process(model, cache)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    after_kill = len(Path("out.jsonl.part").read_bytes().splitlines()) - 1
    assert 0 < after_kill < 600

    process = start_process(model, cache)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    *_, last = said.splitlines()
    kept = len(Path("out.jsonl.part").read_bytes().splitlines()) - 1
    assert after_kill < kept < 600
    part = f"{kept} of 600 rows kept in out.jsonl.part"
    assert last == f"interrupted: {part}; the same command goes on from there"
    assert not Path("out.jsonl").exists()

    assert run(model, "--window-size", "0", "--batch-size", "4") == 0
    assert sum(decoded) == 600 - kept
    rows = results()
    assert [row["id"] for row in rows] == list(range(600))
    for i, row in enumerate(rows):
        assert {**row, "id": i % 8} == rows[i % 8], "whoever decoded it, and in whatever batch"


def test_part_file_of_the_job_is_readable_while_it_runs(work: Path, model: Path) -> None:
    write(words(4))
    seen = []
    add = PartFile.add

    def looking(self: PartFile, rows: Any) -> None:
        add(self, rows)
        seen.append([json.loads(line) for line in self.path.read_bytes().splitlines()])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartFile, "add", looking)
        assert run(model) == 0
    ((_, *lines),) = seen
    assert sorted(line["row"] for line in lines) == [0, 1, 2, 3]
    assert [line["result"] for line in sorted(lines, key=lambda line: line["row"])] == results()
