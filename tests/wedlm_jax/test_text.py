"""Text in and out: loading quietly, whole characters only, stop strings in any tokens."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests.examples.child import run_python
from wedlm_jax.errors import InputError
from wedlm_jax.text import StopStrings, TextCodec

SPECIAL = ["<|endoftext|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and enable_thinking is false %}(quick){% endif %}"
    "{% endif %}"
)
TEXTS = ["naïve café", "日本語のテキスト", "🎉👩‍👩‍👧 ok", "plain", "a\n\n  b ", "��", "e\u0301"]


def byte_tokenizer(merges=None):
    """Byte-level BPE whose tokens are the 256 bytes, the merges given, and the specials."""
    merges = merges or []
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def write_tokenizer(folder, tokenizer, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}), encoding="utf-8"
    )
    return folder


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    # "ab" and "bc" are single tokens, so that stop strings begin and end inside tokens.
    tokenizer = byte_tokenizer([("a", "b"), ("b", "c"), ("ab", "ab")])
    folder = tmp_path_factory.mktemp("tokenizer")
    return TextCodec.load(write_tokenizer(folder, tokenizer, chat_template=TEMPLATE))


# --- loading -----------------------------------------------------------------------------


def test_folder_without_tokenizer_has_no_codec(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "wedlm"}')
    assert TextCodec.load(tmp_path) is None


@pytest.mark.full
def test_loading_is_silent_whatever_config_json_says(tmp_path):
    """A model_type unknown to transformers and old RoPE fields are none of its business."""
    write_tokenizer(tmp_path, byte_tokenizer(), model_max_length=4)
    config = {"model_type": "wedlm", "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = (
        "import pathlib, sys; from wedlm_jax.text import TextCodec; "
        "print(len(TextCodec.load(pathlib.Path(sys.argv[1])).encode('longer than four')))"
    )
    done = run_python("-c", program, tmp_path, timeout=120)
    assert (done.stdout, done.stderr) == ("16\n", "")


def test_loading_leaves_logging_and_environment_as_they_were(tmp_path, monkeypatch):
    import logging
    import os

    import transformers  # noqa: F401  (its import sets the level once)

    monkeypatch.delenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", raising=False)
    logger = logging.getLogger("transformers")
    level = logger.level
    TextCodec.load(write_tokenizer(tmp_path, byte_tokenizer()))
    assert logger.level == level
    assert "TRANSFORMERS_NO_ADVISORY_WARNINGS" not in os.environ


def test_agrees_with_auto_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, byte_tokenizer(), chat_template=TEMPLATE, eos_token="<|im_end|>")
    ours, theirs = TextCodec.load(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    for text in [*TEXTS, "a<|im_end|>b", ""]:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "hi"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "[user] hi[assistant]"  # enable_thinking keeps the template's default
    assert ours.encode_chat(messages) == theirs(text, add_special_tokens=False)["input_ids"]


def test_vocabulary_and_merges_without_tokenizer_json(tmp_path):
    """The older pair of files, under the class that tokenizer_config.json names."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "ab", *SPECIAL])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n", encoding="utf-8")
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "wedlm"}')
    codec = TextCodec.load(tmp_path)
    assert codec.encode("abc") == [vocabulary["ab"], vocabulary["c"]]
    assert codec.decode([vocabulary["ab"], vocabulary["<|im_end|>"]]) == "ab"


def test_template_in_a_file_of_its_own(tmp_path):
    write_tokenizer(tmp_path, byte_tokenizer())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    codec = TextCodec.load(tmp_path)
    assert codec.decode(codec.encode_chat([{"role": "user", "content": "hi"}])) == "hi!"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),  # cut off
        ("tokenizer.json", ""),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", '{"eos_token": '),
        ("tokenizer_config.json", "\x00\x01"),
    ],
)
def test_unreadable_files_are_named_in_one_sentence(tmp_path, name, content):
    folder = write_tokenizer(tmp_path / "模型", byte_tokenizer())
    path = folder / name
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[: len(whole) // 2] if content is None else content, encoding="utf-8")
    with pytest.raises(InputError) as error:
        TextCodec.load(folder)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


# --- messages ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no chat template"),
        ({"chat_template": "{{ raise_exception('roles alternate') }}"}, "roles alternate"),
    ],
)
def test_what_the_template_does_not_take_is_refused(tmp_path, settings, message):
    codec = TextCodec.load(write_tokenizer(tmp_path, byte_tokenizer(), **settings))
    with pytest.raises(InputError, match=message):
        codec.encode_chat([{"role": "user", "content": "hi"}])


# --- whole characters --------------------------------------------------------------------


@settings(max_examples=4 * settings.default.max_examples)
@given(st.text(max_size=12))
def test_text_grows_by_whole_characters(codec, text):
    """Every prefix of the tokens decodes to a prefix of the text, and all of them to it."""
    ids = codec.encode(text)
    assert codec.complete_text(ids) == text
    for length in range(len(ids)):
        assert text.startswith(codec.complete_text(ids[:length]))


def test_incomplete_character_is_held_back(codec):
    ids = codec.encode("x€")
    assert len(ids) == 4
    assert [codec.complete_text(ids[:n]) for n in range(5)] == ["", "x", "x", "x", "x€"]


def test_no_special_token_is_added_to_the_replacement_character(tmp_path):
    """A tokenizer that puts a token before every text must not confuse the check."""
    tokenizer = byte_tokenizer()
    first = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", first)]
    )
    codec = TextCodec.load(write_tokenizer(tmp_path, tokenizer))
    ids = codec.encode("a�")
    assert ids[0] == first
    assert codec.complete_text(ids) == "a�"


# --- stop strings ------------------------------------------------------------------------


@settings(max_examples=4 * settings.default.max_examples)
@given(
    text=st.text("abc€", max_size=10),
    stop=st.lists(st.text("abc€", min_size=1, max_size=4), min_size=1),
    early=st.integers(0, 4),
)
@example(text="abab", stop=["b", "ab"], early=0)
def test_find_agrees_with_a_scan(codec, text, stop, early):
    """What ends within the text of so many tokens does not count."""
    ids = codec.encode(text)
    behind, expected = len(codec.complete_text(ids[:early])), None
    for length in range(1, len(ids) + 1):
        part = codec.complete_text(ids[:length])
        places = [(i, s) for i in range(len(part)) for s in stop if part.startswith(s, i)]
        if places := [i for i, s in places if i + len(s) > behind]:
            expected = (length, part[: min(places)])
            break
    assert StopStrings(codec, stop, early).find(ids) == expected


@settings(max_examples=4 * settings.default.max_examples)
@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1))
def test_safe_length_holds_back_every_beginning(codec, text, stop):
    ends = ((i, text[i:]) for i in range(len(text)))
    starts = [i for i, end in ends if any(s != end and s.startswith(end) for s in stop)]
    assert StopStrings(codec, stop).safe_length(text) == min([*starts, len(text)])
