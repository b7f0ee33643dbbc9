"""A mask token is a row that no text uses, or the one that is asked for and may be."""

import dataclasses
import json

import pytest
from tokenizers import AddedToken, Tokenizer, models

from tests.examples.checkpoints import tiny_config
from train.data.tokenizer import train_tokenizer
from train.mask_token import choose_mask_token, describe_mask_token, is_ordinary, named_mask_token
from wedlm_jax.errors import InputError

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def tokenizer():
    """Ids 0 to 258 are specials and bytes; 259 to 261 were added, as Qwen's are."""
    made = train_tokenizer(["x"], 259, special_tokens=SPECIALS)
    made.add_tokens([AddedToken("<tool_response>"), AddedToken("<|fim_pad|>")])
    made.add_special_tokens([AddedToken("<|vision_pad|>")])
    assert made.get_vocab_size() == 262
    return made


QWEN = dataclasses.replace(
    tiny_config(vocab_size=320), model_type="qwen3", mask_token_id=None, eos_token_ids=(2,)
)
WEDLM = {"model_type": "wedlm", "mask_token_id": 259}
FULL = {"vocab_size": 262}
OWN_MEANING = "is a special token with another meaning"


@pytest.mark.parametrize(
    ("changes", "requested", "expected"),
    [
        # The first row that no token uses.
        ({}, None, 262),
        ({"pad_token_id": 262, "eos_token_ids": (2, 263)}, None, 264),
        # What the model was trained with, unless another is asked for.
        (WEDLM, None, 259),
        (WEDLM, "<|fim_pad|>", 260),
        ({}, "<tool_response>", 259),
        ({}, "262", 262),
        ({}, "<|im_end|>", "ends a text"),
        ({}, "2", "ends a text"),
        ({}, "<|im_start|>", OWN_MEANING),
        ({}, "<|vision_pad|>", OWN_MEANING),
        (WEDLM | {"mask_token_id": 1}, None, OWN_MEANING),
        ({}, "x", "occurs in ordinary text"),
        ({}, "<mask>", "the tokenizer has no such token"),
        ({}, "320", "outside the model's vocabulary of 320"),
        ({}, "-1", "the tokenizer has no such token"),
        (FULL, None, r"all 262 rows .*model\.mask_token"),
        (FULL, "<|fim_pad|>", 260),
    ],
)
def test_it_is_one_that_texts_do_not_have(tokenizer, changes, requested, expected):
    config = dataclasses.replace(QWEN, **changes)
    if isinstance(expected, int):
        assert choose_mask_token(tokenizer, config, requested) == expected
        return
    with pytest.raises(InputError, match=f"mask token.*{expected}"):
        choose_mask_token(tokenizer, config, requested)


def test_the_tokenizers_own_mask_token_is_taken():
    own = train_tokenizer(["x"], 261, special_tokens=(*SPECIALS, "<|mask|>", "[M]"))
    assert choose_mask_token(own, QWEN) == 3
    assert choose_mask_token(own, QWEN, own="[M]") == 4
    assert choose_mask_token(own, QWEN, "<|mask|>") == 3


@pytest.mark.parametrize(
    ("specials", "taken"),
    [
        (("<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<file_sep>"), 4),
        (("<file_sep>", "<filename>", "<reponame>", "<gh_stars>"), 5),
        (("[INST]", "[control_8]", "[control_9]"), 5),
    ],
)
def test_a_full_vocabulary_gives_a_token_in_reserve(specials, taken):
    full = train_tokenizer(["x"], 259 + len(specials), special_tokens=(*SPECIALS, *specials))
    config = dataclasses.replace(QWEN, vocab_size=full.get_vocab_size())
    assert choose_mask_token(full, config) == taken
    assert choose_mask_token(full, config, full.id_to_token(taken)) == taken
    # It goes on being the model's.
    assert choose_mask_token(full, dataclasses.replace(config, mask_token_id=taken)) == taken
    ends = dataclasses.replace(config, eos_token_ids=(2, taken))
    assert choose_mask_token(full, ends) != taken


@pytest.mark.parametrize("by_bytes", [True, False])
def test_the_unknown_token_is_taken_where_none_is_unknown(by_bytes):
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {name: i for i, name in enumerate(names)}
    model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=by_bytes)
    full = Tokenizer(model)
    full.add_special_tokens(["<unk>", "<s>", "</s>"])
    config = dataclasses.replace(QWEN, vocab_size=259, bos_token_id=1)
    if by_bytes:
        assert choose_mask_token(full, config) == 0
    else:
        with pytest.raises(InputError, match="all 259 rows of the vocabulary are used"):
            choose_mask_token(full, config)


def test_it_is_told_with_its_text(tokenizer):
    assert describe_mask_token(tokenizer, 262) == "262 (unused by the tokenizer)"
    assert describe_mask_token(tokenizer, 259) == "259 (<tool_response>)"
    assert [is_ordinary(tokenizer, token) for token in (10, 259, 300)] == [True, False, False]


def test_a_named_mask_token_is_read_in_both_spellings(tmp_path):
    assert named_mask_token(tmp_path) is None
    path = tmp_path / "tokenizer_config.json"
    for spelling in ({"content": "[M]"}, "[M]"):
        path.write_text(json.dumps({"mask_token": spelling, "eos_token": "<|im_end|>"}))
        assert named_mask_token(tmp_path) == "[M]"
    for broken in ("{", "[]"):
        path.write_text(broken)
        with pytest.raises(InputError, match="tokenizer_config"):
            named_mask_token(tmp_path)
