"""The model that `lm_eval` sees, against a plain forward and against `LLM` itself."""

import logging
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from infer.harness.model import HarnessModel
from tests.examples.child import ROOT
from tests.examples.tiny_checkpoint import CONTEXT, EOS, MASK
from tests.infer.harness.conftest import TEXTS
from wedlm_jax.checkpoint.model import load_checkpoint
from wedlm_jax.errors import InputError
from wedlm_jax.masks import CausalMask
from wedlm_jax.params import SamplingParams, sample_seed


def asked(kind, *arguments):
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


@pytest.fixture(scope="module")
def log_probabilities(checkpoint):
    """Log-probabilities ``[T, V]`` of what follows each token, by one forward without a cache."""
    model = load_checkpoint(checkpoint, dtype=jnp.float32)

    def forward(ids):
        padded = jnp.zeros((1, CONTEXT), jnp.int32).at[0, : len(ids)].set(jnp.asarray(ids))
        hidden = model(padded, jnp.arange(CONTEXT)[None], CausalMask())
        # A mask is never an answer.
        logits = model.logits(hidden).at[..., MASK].set(-jnp.inf)
        return np.asarray(jax.nn.log_softmax(logits))[0, : len(ids)]

    return forward


def scored(model, *pairs):
    return model.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)


def by_hand(rows, context, tokens):
    found = rows([*context, *tokens])[len(context) - 1 : -1]
    chosen = found[np.arange(len(tokens)), list(tokens)]
    return float(chosen.sum()), bool((found.argmax(-1) == tokens).all())


def test_the_harness_finds_it_by_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (entry,) = project["entry-points"]["lm_eval.models"].items()
    assert entry == ("wedlm", f"{HarnessModel.__module__}:{HarnessModel.__name__}")
    assert get_model("wedlm") is HarnessModel


def test_log_probabilities_are_those_of_a_plain_forward(model, log_probabilities):
    pairs = [(context, other) for context in TEXTS for other in (" one", " cat", TEXTS[2])]
    likely = model.llm.generate(TEXTS[0], SamplingParams(mode="ar", max_tokens=3))[0]
    assert likely.text
    pairs.append((TEXTS[0], likely.text))
    found = scored(model, *pairs)
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        whole, ids = model.tok_encode(context + continuation), model.tok_encode(context)
        expected = by_hand(log_probabilities, ids, whole[len(ids) :])
        assert value == pytest.approx(expected[0], abs=1e-4)
        assert greedy == expected[1]
    assert {greedy for _, greedy in found} == {True, False}


def test_an_empty_context_is_the_end_of_text(model, log_probabilities):
    assert model.eot_token_id == model.prefix_token_id == EOS
    ((value, _),) = scored(model, ("", "one two"))
    expected, _ = by_hand(log_probabilities, [EOS], model.tok_encode("one two"))
    assert value == pytest.approx(expected, abs=1e-4)


def test_a_context_that_is_too_long_loses_its_beginning(model, log_probabilities, caplog):
    context = " ".join(TEXTS[1] for _ in range(40))
    with caplog.at_level(logging.WARNING):
        ((value, _),) = scored(model, (context, " one"))
    whole, ids = model.tok_encode(context + " one"), model.tok_encode(context)
    tokens = whole[len(ids) :]
    assert len(ids) > model.max_length == 64
    expected, _ = by_hand(log_probabilities, ids[-(64 - len(tokens)) :], tokens)
    assert value == pytest.approx(expected, abs=1e-4)
    assert "1 of 1 texts" in caplog.text
    with pytest.raises(InputError, match="do not fit"):
        scored(model, ("a", context))


def test_every_token_of_a_long_text_is_read_once(model, log_probabilities):
    long = " ".join(TEXTS[i % 3] for i in range(24))
    texts = asked("loglikelihood_rolling", (long,), ("one",), ("",))
    found = model.loglikelihood_rolling(texts, True)
    ids = model.tok_encode(long)
    assert len(ids) > 2 * 63
    # The first 63 behind the end of text; then as many tokens again, each time with what is left
    # of the context before them.
    expected, _ = by_hand(log_probabilities, [EOS], ids[:63])
    for start in range(63, len(ids), 63):
        part = ids[start : start + 63]
        expected += by_hand(log_probabilities, ids[start - 64 + len(part) : start], part)[0]
    assert found[0] == pytest.approx(expected, abs=1e-3)
    expected, _ = by_hand(log_probabilities, [EOS], model.tok_encode("one"))
    assert found[1] == pytest.approx(expected, abs=1e-4)
    assert found[2] == 0


@pytest.mark.full
def test_repeated_requests_draw_other_numbers(model, one_at_a_time):
    arguments = {"until": [], "max_gen_toks": 16, "do_sample": True, "temperature": 0.9, "seed": 5}
    answers = model.generate_until(asked("generate_until", *[(TEXTS[0], arguments)] * 3), True)
    for number, answer in enumerate(answers):
        params = SamplingParams(max_tokens=16, temperature=0.9, seed=sample_seed(5, number))
        assert answer == one_at_a_time.generate(TEXTS[0], params)[0].text
    assert len(set(answers)) > 1


IN_THE_WORDS_OF_THE_HARNESS = [
    ({}, {"max_tokens": 256}),
    ({"until": "x", "max_new_tokens": 9}, {"stop": ("x",), "max_tokens": 9}),
    ({"until": ["a", ""], "stop": ["b"]}, {"stop": ("a", "b"), "max_tokens": 256}),
    ({"stop": "end"}, {"stop": ("end",), "max_tokens": 256}),
    ({"do_sample": True}, {"temperature": 1.0, "max_tokens": 256}),
    ({"do_sample": False, "temperature": 0.7}, {"max_tokens": 256}),
    ({"temperature": 0.7, "top_p": 0.9, "top_k": 5}, None),
    ({"mode": "paper", "entropy_threshold": 0.2}, None),
]


def test_generation_arguments_in_the_words_of_the_harness(model, caplog):
    for arguments, expected in IN_THE_WORDS_OF_THE_HARNESS:
        same = arguments | {"max_tokens": 256}
        assert model._sampling(arguments, 0) == SamplingParams(**(expected or same))
    with caplog.at_level(logging.WARNING):
        model._sampling({"num_beams": 4}, 0)
    assert "num_beams=4 is not used" in caplog.text


@pytest.mark.full
def test_a_prompt_that_is_too_long_loses_its_beginning(model, one_at_a_time):
    prompt = " ".join(TEXTS[1] for _ in range(40))
    arguments = {"until": [], "max_gen_toks": 10}
    (answer,) = model.generate_until(asked("generate_until", (prompt, arguments)), True)
    kept = model.tok_encode(prompt)[-54:]
    assert answer == one_at_a_time.generate([kept], SamplingParams(max_tokens=10))[0].text
    with pytest.raises(InputError, match="max_gen_toks"):
        model.generate_until(asked("generate_until", ("a", {"max_gen_toks": 64})), True)


def test_finished_answers_are_kept_for_a_restart(model):
    kept = []

    class Hook:
        def add_partial(self, kind, arguments, result):
            kept.append((kind, arguments, result))

    arguments = {"until": [], "max_gen_toks": 4}
    before, model.cache_hook = model.cache_hook, Hook()  # type: ignore[assignment]
    try:
        answers = model.generate_until(asked("generate_until", *((t, arguments) for t in TEXTS)))
        (likely,) = scored(model, ("a", " one"))
        (read,) = model.loglikelihood_rolling(asked("loglikelihood_rolling", ("one",)))
    finally:
        model.cache_hook = before
    for text, answer in zip(TEXTS, answers, strict=True):
        assert ("generate_until", (text, arguments), answer) in kept
    assert kept[len(TEXTS) :] == [
        ("loglikelihood", ("a", " one"), likely),
        ("loglikelihood_rolling", ("one",), read),
    ]


def test_a_chat_is_asked_or_its_last_message_continued(model):
    user = {"role": "user", "content": "one"}
    text = model.apply_chat_template([user])
    assert model.tok_encode(text) == model.llm.chat_prompt([user])
    begun = [user, {"role": "assistant", "content": "two"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False) == text + "two"


BAD_ARGUMENTS = [
    ({"windowsize": 4}, "unknown model argument 'windowsize'; did you mean 'window_size'"),
    ({"dtype": "float8"}, "dtype"),
    ({"mode": "fast"}, "mode"),
    ({"batch_size": "many"}, "batch_size"),
    ({"batch_size": 0}, "batch_size"),
    ({"tensor_parallel_size": 1000}, "mesh"),
    ({"pretrained": "no/such/folder/here"}, "no/such/folder"),
]


def test_bad_model_arguments_are_refused(checkpoint, without_tokenizer):
    for arguments, sentence in BAD_ARGUMENTS:
        with pytest.raises(InputError, match=sentence):
            HarnessModel(**({"pretrained": checkpoint} | arguments))
    with pytest.raises(InputError, match="has no tokenizer"):
        HarnessModel(without_tokenizer)
