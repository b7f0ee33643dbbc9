"""What the Python API refuses, in one sentence and before anything runs, and what it warns of."""

import dataclasses
import json

import pytest

from tests.examples.tiny_checkpoint import CONTEXT, VOCAB_SIZE, write_tiny_checkpoint
from wedlm_jax.checkpoint.open import find_model
from wedlm_jax.engine.engine import Engine
from wedlm_jax.errors import InputError
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

GREEDY = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, window_size=4, max_batch_size=4)


@pytest.fixture
def never_runs(monkeypatch):
    def run(*_, **__):
        raise AssertionError("it ran")

    monkeypatch.setattr(Engine, "step", run)


@pytest.mark.usefixtures("never_runs")
@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", "b" * 400], GREEDY, rf"prompt 1: .*max_tokens 24 exceed max_model_len {CONTEXT}"),
        ("a", SamplingParams(max_tokens=CONTEXT), f"1 token and max_tokens {CONTEXT} exceed"),
        (["a", ""], GREEDY, "prompt 1: the prompt has no tokens"),
        ([[]], GREEDY, "the prompt has no tokens"),
        ([[1, VOCAB_SIZE]], GREEDY, f"token id {VOCAB_SIZE} lies outside the vocabulary"),
        ([[1], [2, -1]], GREEDY, "prompt 1: prompt token id -1 lies outside"),
        (["a", None], GREEDY, "prompt 1: expected a text or a flat list of token ids"),
        ([[1, True]], GREEDY, "expected a text or a flat list of token ids"),
        ([1, "a"], GREEDY, "prompt 0: expected a text or a flat list of token ids"),
        ([[1.0, 2.0]], GREEDY, "expected a text or a flat list of token ids"),
        ([[[1], [2, 3]]], GREEDY, "expected a text or a flat list of token ids"),
        (7, GREEDY, "prompts: expected a text, .* not int"),
        (b"text", GREEDY, "prompts: expected a text, .* not bytes"),
        ({"prompt": "a"}, GREEDY, "prompts: expected a text, .* not dict"),
        ("half \ud83d", GREEDY, "half of a surrogate pair: not UTF-8"),
        ("a", {"max_tokens": 3}, "params: expected SamplingParams"),
        ("a", "greedy", "params: expected SamplingParams"),
        ("a", [None], "params: expected SamplingParams"),
        (["a", "b"], [GREEDY], "2 prompts came with 1 sampling parameters"),
        ("a", SamplingParams(stop_token_ids=(VOCAB_SIZE,)), "stop_token_ids: 300 is outside"),
    ],
)
def test_refused_before_running(llm, prompts, params, message):
    with pytest.raises(InputError, match=message):
        llm.generate(prompts, params)


@pytest.mark.usefixtures("never_runs")
@pytest.mark.parametrize(
    ("conversations", "message"),
    [
        ("hello", "conversations: expected lists of messages, not str"),
        (5, "conversations: expected lists of messages, not int"),
        ([[]], "messages: expected a list of at least one"),
        ([{"role": "user"}], r"messages\[0\].content: expected a text, .* not null"),
        (
            [[{"role": "user", "content": "a"}], ["b"]],
            r"conversation 1: messages\[0\]: .* not \"b\"",
        ),
    ],
)
def test_refused_conversations(llm, conversations, message):
    with pytest.raises(InputError, match=message):
        llm.chat(conversations, GREEDY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float64"}, "dtype: expected one of"),
        ({"max_batch_size": 0}, "max_batch_size: expected an integer of at least 1"),
        ({"max_batch_size": "4"}, "max_batch_size: expected an integer of at least 1"),
        ({"mesh": {"fsdp": 2}}, "mesh: expected data and tensor, not 'fsdp'"),
        ({"mesh": {"data": 3, "tensor": 3}}, "needs 9 devices, and there are 8"),
        ({"mesh": {"data": 0}}, "needs 0 devices"),
        ({"attention": "flash"}, "attention: expected one of"),
        ({"window_size": -1}, "window_size: expected an integer"),
        ({"max_model_len": CONTEXT + 1}, f"max_model_len: expected 1 to {CONTEXT}"),
        ({"refill": "never"}, "refill: expected one of"),
        ({"quantization": "int3"}, "quantization: expected one of int8, None, not 'int3'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: expected one of int8, None, not 'fp8'"),
    ],
)
def test_refused_settings(folder, arguments, message):
    with pytest.raises(InputError, match=message):
        LLM(folder, **arguments)


def test_missing_models(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="nowhere: no such folder"):
        LLM(tmp_path / "nowhere")
    monkeypatch.setattr("wedlm_jax.checkpoint.open.EMBEDDED_MODEL", tmp_path / "embedded")
    with pytest.raises(InputError, match="no model is embedded"):
        find_model(None)


def test_a_model_with_a_chat_template_says_once_that_a_text_goes_without_them(folder, capsys):
    fresh = LLM(folder, window_size=4)
    fresh.prepare_one([5, 6], GREEDY)
    fresh.prepare_one("<|im_start|>user\na<|im_end|>\n", GREEDY)
    fresh.prepare_one(fresh.chat_prompt([{"role": "user", "content": "a"}]), GREEDY)
    assert capsys.readouterr().err == ""
    fresh.prepare(["a", "b"], GREEDY)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"plain-text prompts are completed without the chat template of {folder};"
    )


def test_a_model_without_masks_says_once_that_it_decodes_autoregressively(tmp_path, capsys):
    qwen = write_tiny_checkpoint(tmp_path / "qwen")
    config = json.loads((qwen / "config.json").read_text(encoding="utf-8"))
    (qwen / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    LLM(qwen, window_size=0).prepare_one([5, 6], GREEDY)
    fresh = LLM(qwen)
    masks = SamplingParams(draft="masks")
    for refuse in (lambda: fresh.prepare_one([5, 6], masks), lambda: fresh.warm_up(masks)):
        with pytest.raises(InputError, match=f"^draft: {qwen} was not trained on masks"):
            refuse()
    fresh.prepare_one([5, 6], SamplingParams(draft="masks", mode="ar"))
    without = LLM(write_tiny_checkpoint(tmp_path / "tiny"), window_size=0)
    for draft in ("masks", "lookup"):
        with pytest.raises(InputError, match=f"^draft: {draft} needs a window_size above 0"):
            without.prepare_one([5], SamplingParams(draft=draft))
    for mode in ("ar", "verified"):
        fresh.prepare_one([5, 6], SamplingParams(mode=mode))
    assert capsys.readouterr().err == ""
    paper = SamplingParams(mode="paper")
    fresh.prepare([[5, 6], [7]], paper)
    fresh.prepare_one([5], paper)
    assert capsys.readouterr().err == (
        f"{qwen} (qwen3) was not trained on masks: decoding autoregressively, as with a window of "
        "0\n"
    )


def test_samples_where_one_is_expected_are_refused(llm):
    params = dataclasses.replace(GREEDY, temperature=1.0, n=2)
    with pytest.raises(InputError, match=r"^n: expected 1 here, not 2"):
        next(llm.stream("the cat", params))
    with pytest.raises(InputError, match=r"^n: expected 1 here, not 2"):
        llm.prepare_one("the cat", params)


def test_what_cannot_be_scored_is_refused(llm):
    with pytest.raises(InputError, match="as many completions as prompts"):
        llm.score(["one", "two"], ["three"])
    with pytest.raises(InputError, match=r"pair 1: .*max_model_len"):
        llm.score(["one"] * 2, ["two", [5] * 400])
    with pytest.raises(InputError, match="outside the vocabulary"):
        llm.score(["one"], [[5, 1000]])
    with pytest.raises(InputError, match="top: expected an integer from 0 to 20"):
        llm.score(["one"], ["two"], top=21)


def test_without_a_tokenizer_texts_are_refused(tmp_path):
    bare = LLM(write_tiny_checkpoint(tmp_path / "bare", tokenizer=False), window_size=4)
    for prompt, params in (("text", GREEDY), ([5], dataclasses.replace(GREEDY, stop="x"))):
        with pytest.raises(InputError, match="bare has no tokenizer"):
            bare.generate(prompt, params)
    with pytest.raises(InputError, match="bare has no tokenizer"):
        bare.chat([{"role": "user", "content": "hello"}])


def test_sampling_params_may_be_named_as_in_other_engines(llm):
    expected = llm.generate("a", GREEDY)[0].token_ids
    assert llm.generate("a", sampling_params=GREEDY)[0].token_ids == expected
    *_, last = llm.stream("a", sampling_params=GREEDY)
    assert last.completion.token_ids == expected


@pytest.mark.parametrize(
    ("call", "given", "hint"),
    [
        (LLM, "tensor_parallel_size", 'did you mean mesh={"tensor": N}?'),
        (LLM, "data_parallel_size", 'did you mean mesh={"data": N}?'),
        (LLM, "max_num_seqs", "did you mean 'max_batch_size'?"),
        (LLM, "wedlm_window_size", "did you mean 'window_size'?"),
        (LLM, "max_seq_len", "did you mean 'max_model_len'?"),
        (LLM, "model_path", "did you mean 'model'?"),
        (LLM, "torch_dtype", "did you mean 'dtype'?"),
        (LLM, "seed", "did you mean SamplingParams(seed=...)?"),
        (LLM, "trust_remote_code", "it is not needed: no code of a checkpoint is run"),
        (LLM, "enforce_eager", "it is not needed: each forward is one of a few compiled programs"),
        (LLM.generate, "params", "did you mean 'sampling_params'?"),
        (LLM.generate, "use_tqdm", "did you mean 'on_progress'?"),
        (LLM.generate, "max_new_tokens", "did you mean SamplingParams(max_tokens=...)?"),
        (LLM.generate, "temperature", "did you mean SamplingParams(temperature=...)?"),
        (LLM.chat, "messages", "did you mean 'conversations'?"),
        (LLM.stream, "stop", "did you mean SamplingParams(stop=...)?"),
        (LLM.stream, "window_size", "did you mean 'window'?"),
    ],
)
def test_an_argument_of_other_engines_is_told_by_ours(call, given, hint):
    who = "LLM" if call is LLM else f"LLM.{call.__name__}"
    before = () if call is LLM else (None, "a")
    with pytest.raises(TypeError) as refused:
        call(*before, **{given: 1})
    assert str(refused.value) == f"{who}: unknown argument {given!r}; {hint}"
