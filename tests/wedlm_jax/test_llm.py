"""The Python API: order, parameters, streaming, independence of batches, and what is refused."""

import dataclasses
import math
import re
from functools import partial

import numpy as np
import pytest

from tests.examples.checkpoints import edit_json
from tests.examples.decode import EVERYTHING, as_if_first
from tests.examples.schemas import fits
from tests.examples.tiny_checkpoint import (
    CONTEXT,
    PROMPTS,
    TEXTS,
    VOCAB_SIZE,
    write_tiny_checkpoint,
)
from train.data.tokenizer import save_tokenizer, train_tokenizer
from wedlm_jax.engine.engine import Engine
from wedlm_jax.errors import InputError
from wedlm_jax.generation import WAITING
from wedlm_jax.host.progress import Progress
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams, sample_seed
from wedlm_jax.text import TextCodec

GREEDY = SamplingParams(mode="paper", max_tokens=24)
SAMPLED = SamplingParams(mode="paper", max_tokens=24, temperature=1.0, entropy_threshold=2.0)
VERIFIED = SamplingParams(max_tokens=24, temperature=1.0)
PLAIN = SamplingParams(max_tokens=24)
SMALL = {"max_batch_size": 4, "deterministic": True}
"""One size of forwards: little is compiled."""


@pytest.fixture(scope="module")
def llm(checkpoint):
    llm = LLM(checkpoint, window_size=4, **SMALL)
    llm.warm_up(EVERYTHING)
    return llm


@pytest.fixture(scope="module")
def whole(llm):
    """What greedy decoding makes of each prompt."""
    return llm.generate(PROMPTS, GREEDY)


def cold(completions):
    """The same, but for what was in the cache before."""
    return list(map(as_if_first, completions))


# --- order and parameters ----------------------------------------------------------------


def test_results_are_in_the_order_of_prompts_in_any_container(llm, whole):
    assert len({tuple(one.token_ids) for one in whole}) == len(PROMPTS), "all differ"
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    assert llm.generate([PROMPTS[i] for i in order], GREEDY) == [whole[i] for i in order]
    assert llm.generate(PROMPTS[0], GREEDY) == whole[:1]
    assert llm.generate([], GREEDY) == llm.generate([], []) == llm.chat([]) == []
    ids = llm.codec.encode(PROMPTS[1])
    for prompt in (ids, tuple(ids), np.array(ids), [ids], [np.array(ids, np.int32)]):
        assert llm.generate(prompt, GREEDY) == [whole[1]]


def test_each_row_has_its_own_parameters(llm, whole):
    end, text = whole[2].token_ids[6], whole[0].text
    stop = text[len(text) // 2 :][:3]
    changes = [
        {"stop": stop},
        {"max_tokens": 3},
        {"stop_token_ids": (end,)},
        {"entropy_threshold": None},
        {},
    ]
    params = [dataclasses.replace(GREEDY, **change) for change in changes]
    by_text, short, by_token, slow, plain = mixed = llm.generate(PROMPTS[:5], params)
    assert mixed == [
        llm.generate(prompt, p)[0] for prompt, p in zip(PROMPTS[:5], params, strict=True)
    ]
    assert (by_text.text, by_text.finish_reason) == (text[: text.index(stop)], "stop")
    assert by_text.token_ids == whole[0].token_ids[: len(by_text.token_ids)]
    assert by_text.num_forwards < whole[0].num_forwards
    assert (len(short.token_ids), short.finish_reason) == (3, "length")
    assert len(by_token.token_ids) == by_token.token_ids.index(end) + 1
    assert by_token.finish_reason == "stop"
    assert slow.tokens_per_forward <= 1
    assert plain == whole[4]


def test_chat_is_the_template_then_generate(llm):
    conversation = [{"role": "user", "content": "the cat"}]
    ids = llm.codec.encode("<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n")
    assert llm.chat_prompt(conversation) == ids
    expected = cold(llm.generate([ids], GREEDY))
    assert cold(llm.chat(conversation, GREEDY)) == expected
    assert cold(llm.chat([conversation] * 4, GREEDY)) == expected * 4


def test_progress_reaches_the_totals(llm, whole):
    seen = []
    llm.generate(PROMPTS, GREEDY, on_progress=seen.append)
    counts = [(len(c.token_ids), c.num_forwards, c.num_token_instances) for c in whole]
    total = (sum(column) for column in zip(*counts, strict=True))
    assert seen[-1] == Progress(len(PROMPTS), len(PROMPTS), *total)
    assert [p.finished for p in seen] == sorted(p.finished for p in seen)


# --- samples and options -----------------------------------------------------------------


def test_what_it_is_shows(llm):
    assert repr(llm).startswith(f"LLM('{llm.folder}', ")
    assert llm.tokenizer("the cat")["input_ids"] == llm.codec.encode("the cat")


def test_samples_are_what_their_seeds_give_alone_and_differ_without(llm):
    unseeded = dataclasses.replace(SAMPLED, seed=None)
    assert len({tuple(llm.generate("the cat", unseeded)[0].token_ids) for _ in range(4)}) > 1
    params = [dataclasses.replace(SAMPLED, n=n, seed=5) for n in (3, 1)]
    seen = []
    three, one = llm.generate(PROMPTS[:2], params, on_progress=seen.append)
    seeds = [sample_seed(5, i) for i in range(3)]
    alone = llm.generate([PROMPTS[0]] * 3, [dataclasses.replace(SAMPLED, seed=s) for s in seeds])
    assert [dataclasses.replace(c, further=()) for c in three.samples] == alone
    assert three.further == three.samples[1:] == tuple(alone[1:])
    assert one.samples == (one,)
    assert len({tuple(c.token_ids) for c in three.samples}) == 3
    tokens = sum(len(c.token_ids) for c in (*three.samples, one))
    assert (seen[-1].finished, seen[-1].total, seen[-1].tokens) == (2, 2, tokens)


def test_scores_are_the_log_probabilities_of_autoregressive_decoding(llm):
    params = SamplingParams(mode="ar", temperature=1.0, max_tokens=20, logprobs=3, seed=5)
    decoded = llm.generate(PROMPTS, params)
    scored = llm.score(PROMPTS, [c.token_ids for c in decoded], top=3)
    for completion, places in zip(decoded, scored, strict=True):
        assert len(places) == len(completion.token_ids)
        for one, other in zip(completion.logprobs, places, strict=True):
            assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
            assert [i for i, _ in other.top] == [i for i, _ in one.top]
        assert completion.confidence == [math.exp(one.logprob) for one in completion.logprobs]
    assert llm.score(["one"], [[]]) == [[]]


def test_bad_words_as_texts(llm, whole):
    texts = {(token,): llm.codec.decode([token]) for token in whole[0].token_ids}
    # A token of the completion that is its text's own spelling.
    word = next(
        text for ids, text in texts.items() if text.strip() and ids in llm.codec.spellings(text)
    )
    params = dataclasses.replace(GREEDY, bad_words=(word,))
    ids = dataclasses.replace(GREEDY, bad_words=tuple(llm.codec.spellings(word)))
    (found,) = llm.generate(PROMPTS[0], params)
    assert found == llm.generate(PROMPTS[0], ids)[0] != whole[0]


def test_schemas_expressions_and_neither_side_by_side(llm):
    schema = {"type": "array", "items": {"enum": ["one", 2]}, "minItems": 3, "maxItems": 3}
    regex = "(cat|dog) [0-9]{4}(, é{1,3}){2}"
    params = [
        SamplingParams(max_tokens=60, json_schema=schema, temperature=1.0),
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=60, regex=regex, temperature=1.0, n=3),
        SamplingParams(max_tokens=12, mode="ar", temperature=1.0),
    ]
    listed, plain, matched, drawn = llm.generate(TEXTS, params)
    assert fits(listed.text, schema)
    assert len(matched.samples) == 3
    assert all(re.fullmatch(regex, sample.text) for sample in matched.samples)
    assert plain.token_ids == llm.generate(TEXTS[1], params[1])[0].token_ids
    assert drawn.token_ids == llm.generate(TEXTS[3], params[3])[0].token_ids


# --- programs and devices ----------------------------------------------------------------


def test_after_a_warm_up_nothing_is_compiled(checkpoint, whole):
    llm = LLM(checkpoint, window_size=4, **SMALL)
    llm.warm_up([SAMPLED, VERIFIED])
    programs, spent = llm.engine.num_programs, llm.engine.compile_seconds
    assert spent > 0
    prompts = [[token] * length for token, length in enumerate([5, 36, 290, 28, 3, 17] * 2, 3)]
    llm.generate(prompts, dataclasses.replace(SAMPLED, max_tokens=9))
    assert llm.generate(PROMPTS, GREEDY) == whole
    params = dataclasses.replace(VERIFIED, stop="never", temperature=0.0)
    list(llm.stream(PROMPTS[0], params, window=2))
    assert (llm.engine.num_programs, llm.engine.compile_seconds) == (programs, spent)


def test_prompts_are_read_only_some_way_ahead(llm):
    read = 0

    def prompts():
        nonlocal read
        for i in range(60):
            read += 1
            yield [7 + i % 5, 9], dataclasses.replace(GREEDY, max_tokens=4)

    finished = 0
    for some in llm.run(prompts()):
        finished += len(some)
        # Four that decode, those that finished with them, and those that wait.
        assert read <= finished + 4 + WAITING + 4
    assert finished == read == 60


def test_once_it_is_to_stop_no_other_prompt_begins(llm):
    finished = []
    prompts = [([7 + i % 5, 9], GREEDY) for i in range(40)]
    for some in llm.run(prompts, stopping=lambda: bool(finished)):
        finished.extend(place for place, _ in some)
    assert 1 <= len(finished) < 40
    llm._loop.close()
    assert not llm.engine.has_work


def test_only_what_the_tokenizer_knows_is_chosen(tmp_path):
    """The model has more rows; without a tokenizer all of them may be chosen."""
    folder = write_tiny_checkpoint(tmp_path, tokenizer=False)
    hot = SamplingParams(mode="ar", max_tokens=60, temperature=3.0, seed=1, ignore_eos=True)

    def chosen():
        llm = LLM(folder, window_size=0, max_batch_size=4)
        return {token for one in llm.generate([[7], [8, 9]], hot) for token in one.token_ids}

    assert max(chosen()) >= 270
    save_tokenizer(train_tokenizer(TEXTS, 270), folder)
    known = TextCodec.load(folder)
    assert chosen() <= known.token_ids <= set(range(270))


# --- streaming ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "with_stop"),
    [(GREEDY, True), (SAMPLED, False), (VERIFIED, True), (VERIFIED, False)],
    ids=["greedy, stopped", "sampled", "verified, stopped", "verified"],
)
def test_stream_adds_up_to_generate(llm, params, with_stop, monkeypatch):
    monkeypatch.setattr("wedlm_jax.llm.STREAM_SECONDS", 1e-9)  # a forward per burst
    (expected,) = llm.generate(PROMPTS[3], params)
    if with_stop:
        assert expected.text
        params = dataclasses.replace(params, stop=(expected.text[-6:-3], "never"))
        (expected,) = llm.generate(PROMPTS[3], params)
        assert expected.finish_reason == "stop"
    for _ in range(9):  # a reader that wakes late gets several bursts at once
        chunks = list(llm.stream(PROMPTS[3], params))
        if len(chunks) > 2:
            break
    assert len(chunks) > 2
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert [t for chunk in chunks for t in chunk.token_ids] == expected.token_ids
    assert chunks[-1].completion == expected
    assert all(chunk.completion.finish_reason is None for chunk in chunks[:-1])


# --- limits ----------------------------------------------------------------------------


def test_token_ids_need_no_tokenizer_and_texts_do(tmp_path, llm, whole):
    bare = LLM(write_tiny_checkpoint(tmp_path / "bare", tokenizer=False), window_size=4, **SMALL)
    chat = [{"role": "user", "content": "hello"}]
    stopped = dataclasses.replace(PLAIN, stop="x")
    for call, given in ((bare.generate, "text"), (bare.generate, [5]), (bare.chat, chat)):
        with pytest.raises(InputError, match="bare has no tokenizer"):
            call(given, stopped if given == [5] else PLAIN)
    ids = llm.codec.encode(PROMPTS[0])
    assert bare.generate([ids], GREEDY) == [dataclasses.replace(whole[0], text=None)]
    assert list(bare.stream(ids, GREEDY))[-1].completion.token_ids == whole[0].token_ids


# --- what is refused before anything runs, and what is warned of -------------------------


@pytest.fixture
def never_runs(monkeypatch):
    def run(*_, **__):
        raise AssertionError("it ran")

    monkeypatch.setattr(Engine, "step", run)


TWO_SAMPLES = SamplingParams(temperature=1.0, n=2)


@pytest.mark.usefixtures("never_runs")
@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", "b" * 400], PLAIN, rf"prompt 1: .*max_tokens 24 exceed max_model_len {CONTEXT}"),
        (["a", ""], PLAIN, "prompt 1: the prompt has no tokens"),
        ([[1, VOCAB_SIZE]], PLAIN, f"token id {VOCAB_SIZE} lies outside the vocabulary"),
        ([[1], [2, -1]], PLAIN, "prompt 1: prompt token id -1 lies outside"),
        (["a", None], PLAIN, "prompt 1: expected a text or a flat list of token ids"),
        ([[1, True]], PLAIN, "expected a text or a flat list of token ids"),
        ([[1.0, 2.0]], PLAIN, "expected a text or a flat list of token ids"),
        ([[[1], [2, 3]]], PLAIN, "expected a text or a flat list of token ids"),
        (b"text", PLAIN, "prompts: expected a text, .* not bytes"),
        ("half \ud83d", PLAIN, "half of a surrogate pair: not UTF-8"),
        ("a", {"max_tokens": 3}, "params: expected SamplingParams"),
        ("a", [None], "params: expected SamplingParams"),
        (["a", "b"], [PLAIN], "2 prompts came with 1 sampling parameters"),
        ("a", SamplingParams(stop_token_ids=(VOCAB_SIZE,)), "stop_token_ids: 300 is outside"),
    ],
)
def test_refused_before_running(llm, prompts, params, message):
    with pytest.raises(InputError, match=message):
        llm.generate(prompts, params)


@pytest.mark.usefixtures("never_runs")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.chat("hello"), "conversations: expected lists of messages, not str"),
        (lambda llm: llm.chat(5), "conversations: expected lists of messages, not int"),
        (lambda llm: llm.chat([[]]), "messages: expected a list of at least one"),
        (
            lambda llm: llm.chat([[{"role": "user", "content": "a"}], ["b"]]),
            r"conversation 1: messages\[0\]: .* not \"b\"",
        ),
        (lambda llm: next(llm.stream("a", TWO_SAMPLES)), r"^n: expected 1 here, not 2"),
        (lambda llm: llm.prepare_one("a", TWO_SAMPLES), r"^n: expected 1 here, not 2"),
        (lambda llm: llm.score(["one", "two"], ["three"]), "as many completions as prompts"),
        (lambda llm: llm.score(["a", "b"], ["c", [5] * 400]), r"pair 1: .*max_model_len"),
        (lambda llm: llm.score(["one"], [[5, 1000]]), "outside the vocabulary"),
        (lambda llm: llm.score(["a"], ["b"], top=21), "top: expected an integer from 0 to 20"),
    ],
)
def test_refused_calls(llm, call, message):
    with pytest.raises(InputError, match=message):
        call(llm)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float64"}, "dtype: expected one of"),
        ({"max_batch_size": 0}, "max_batch_size: expected an integer from 1 to 65,536"),
        ({"mesh": {"fsdp": 2}}, "mesh: expected data and tensor, not 'fsdp'"),
        ({"mesh": {"data": 3, "tensor": 3}}, "needs 9 devices, but there are 8"),
        ({"mesh": {"data": 0}}, "needs 0 devices"),
        ({"attention": "flash"}, "attention: expected one of"),
        ({"attention": "rpa"}, "attention 'rpa' is for TPUs, not for 'cpu'"),
        ({"max_model_len": CONTEXT + 1}, f"max_model_len: expected 1 to {CONTEXT}"),
        ({"window_size": -1}, "window_size: expected an integer of at least 0 or 'auto', not -1"),
        ({"window_size": CONTEXT + 1}, f"window_size: expected at most {CONTEXT}, the longest"),
        ({"lookup": 16}, "lookup: expected an integer from 0 to 15, not 16"),
        ({"num_pages": 1}, "num_pages: expected"),
        ({"page_size": 0}, "page_size: expected"),
        ({"quantization": "int3"}, "quantization: expected one of int8, None, not 'int3'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: expected one of int8, None, not 'fp8'"),
    ],
)
def test_refused_settings(checkpoint, arguments, message):
    with pytest.raises(InputError, match=message):
        LLM(checkpoint, **arguments)


@pytest.mark.parametrize("name", ["max_model_len", "window_size"])
def test_what_exceeds_the_context_is_refused_before_weights_are_read(checkpoint, monkeypatch, name):
    monkeypatch.setattr("wedlm_jax.llm.load_checkpoint", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(InputError, match=rf"^{name}: expected .*{CONTEXT}, .*, not {CONTEXT + 1}"):
        LLM(checkpoint, **{name: CONTEXT + 1})


def test_a_model_with_a_chat_template_says_once_that_a_text_goes_without_them(checkpoint, capsys):
    fresh = LLM(checkpoint, window_size=4)
    fresh.prepare_one([5, 6], PLAIN)
    fresh.prepare_one("<|im_start|>user\na<|im_end|>\n", PLAIN)
    fresh.prepare_one(fresh.chat_prompt([{"role": "user", "content": "a"}]), PLAIN)
    assert capsys.readouterr().err == ""
    fresh.prepare(["a", "b"], PLAIN)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"plain-text prompts are completed without the chat template of {checkpoint};"
    )


def test_a_model_without_masks_says_once_that_it_decodes_autoregressively(tmp_path, capsys):
    qwen = write_tiny_checkpoint(tmp_path / "qwen")
    edit_json(qwen / "config.json", model_type="qwen3")
    LLM(qwen, window_size=0).prepare_one([5, 6], PLAIN)
    fresh = LLM(qwen)
    masks = SamplingParams(draft="masks")
    for refuse in (partial(fresh.prepare_one, [5, 6]), fresh.warm_up):
        with pytest.raises(InputError, match=f"^draft: {qwen} was not trained on masks"):
            refuse(masks)
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


@pytest.mark.parametrize(
    ("call", "given", "hint"),
    [
        (LLM, "tensor_parallel_size", 'did you mean mesh={"tensor": N}?'),
        (LLM, "max_num_seqs", "did you mean 'max_batch_size'?"),
        (LLM, "seed", "did you mean SamplingParams(seed=...)?"),
        (LLM, "trust_remote_code", "it is not needed: code in a checkpoint is never run"),
        (LLM.generate, "use_tqdm", "did you mean 'on_progress'?"),
        (LLM.generate, "max_new_tokens", "did you mean SamplingParams(max_tokens=...)?"),
        (LLM.chat, "messages", "did you mean 'conversations'?"),
        (LLM.stream, "window_size", "did you mean 'window'?"),
    ],
)
def test_an_argument_of_other_engines_is_told_by_ours(call, given, hint):
    who = "LLM" if call is LLM else f"LLM.{call.__name__}"
    before = () if call is LLM else (None, "a")
    with pytest.raises(TypeError) as refused:
        call(*before, **{given: 1})
    assert str(refused.value) == f"{who}: unknown argument {given!r}; {hint}"
