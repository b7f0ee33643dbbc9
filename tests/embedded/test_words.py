"""The embedded model: one token a word, and its folder."""

import re

import numpy as np
import pytest
from tokenizers import Tokenizer

import examples.embedded.__main__ as embedded
import examples.embedded.words as words
from examples.embedded.corpus import REGIMES, generate, is_heldout
from tests.examples.checkpoints import edit_json, hf_values, set_tensors
from tests.examples.data import EMBEDDED
from tests.examples.tiny_checkpoint import TEXTS, VOCAB_SIZE, write_tiny_checkpoint
from train.data.tokenizer import save_tokenizer, train_tokenizer
from wedlm_jax.errors import InputError
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams
from wedlm_jax.records.questions import read_questions

EMBEDDING = "model.embed_tokens.weight"


def test_every_word_of_the_corpus_is_one_token_of_the_embedded_model():
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    assert words.split_words(tokenizer, words.corpus_texts(1000, seed=31)) == []


def test_only_words_that_had_several_tokens_are_spelled_otherwise():
    before = train_tokenizer(TEXTS, VOCAB_SIZE)
    added = words.split_words(before, iter(["cat category the catlike 2048 ;;;"]))
    assert added == ["cat", "Ġcategory", "Ġcatlike", "Ġthe"]
    after = words.with_words(before, added)
    assert after.encode("cat category catlike the").ids == list(range(VOCAB_SIZE, VOCAB_SIZE + 4))
    for text in ("the cat sat on a mat", "catlike categorys", " CAT\n2048;;", "naïve 日本語"):
        assert after.encode(text).ids == before.encode(text).ids, text
    assert after.decode(after.encode("the category, catlike").ids) == "the category, catlike"


def test_rows_begin_as_the_mean_of_their_pieces_and_as_long_as_they_are():
    tokenizer = train_tokenizer(TEXTS, VOCAB_SIZE)
    rows = np.random.default_rng(0).normal(size=(VOCAB_SIZE, 16))
    (row,) = words.word_rows(tokenizer, ["zebra"], rows)
    pieces = rows[tokenizer.encode("zebra").ids]
    assert len(pieces) > 1
    mean = pieces.mean(axis=0)
    assert row @ mean == pytest.approx(np.linalg.norm(row) * np.linalg.norm(mean))
    assert np.linalg.norm(row) == pytest.approx(np.linalg.norm(pieces, axis=1).mean())


def test_a_checkpoint_keeps_its_weights_and_grows_by_the_words(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(words, "SAMPLES", 20)
    old, new = write_tiny_checkpoint(tmp_path / "old"), tmp_path / "new"
    assert words.main([str(old), str(new)]) == 0
    before, after = hf_values(old), hf_values(new)
    added = len(after[EMBEDDING]) - VOCAB_SIZE
    assert added > 100
    assert f"{added} words added" in capsys.readouterr().out
    np.testing.assert_array_equal(after.pop(EMBEDDING)[:VOCAB_SIZE], before.pop(EMBEDDING))
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)
    tokenizer = Tokenizer.from_file(str(new / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE + added
    with pytest.raises(InputError, match="new: every word of the corpus is one token already"):
        words.add_words(new, tmp_path / "again")


def test_what_cannot_grow_is_refused(tmp_path):
    bare = write_tiny_checkpoint(tmp_path / "bare", tokenizer=False)
    with pytest.raises(InputError, match=r"bare: no tokenizer\.json"):
        words.add_words(bare, tmp_path / "new")
    save_tokenizer(train_tokenizer(TEXTS, VOCAB_SIZE - 1), bare)
    with pytest.raises(InputError, match=r"299 tokens in the tokenizer, 300 in config\.json"):
        words.add_words(bare, tmp_path / "new")
    untied = write_tiny_checkpoint(tmp_path / "untied")
    edit_json(untied / "config.json", tie_word_embeddings=False)
    set_tensors(untied, **{"lm_head.weight": hf_values(untied)[EMBEDDING]})
    with pytest.raises(InputError, match="untied: expected a head tied to the embedding"):
        words.add_words(untied, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.full
def test_the_embedded_model_fills_masks_of_prose_with_words():
    """Masks do not see each other, so a word of several tokens might come out as none."""
    prose = generate(31, 3000, split="train", weights={"prose": 1.0})
    known = {word for sample in prose for word in re.findall(r"[^\W\d_]+", sample.answer)}
    questions = read_questions(EMBEDDED / "heldout.jsonl")["prose"][:8]
    llm = LLM(window_size=8, max_batch_size=8, deterministic=True)
    completions = llm.chat(
        [[{"role": "user", "content": question.prompt}] for question in questions],
        SamplingParams(mode="paper", max_tokens=120),
    )
    said = [word for done in completions for word in re.findall(r"[^\W\d_]+", done.text)]
    assert len(said) > 200
    assert [word for word in said if word not in known] == []


def test_weights_are_rounded_and_questions_are_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "QUESTIONS", {"low_entropy": 4, "reasoning": 3, "prose": 2})
    trained = write_tiny_checkpoint(tmp_path / "hf")
    folder = tmp_path / "embedded"
    folder.mkdir()
    (folder / "README.md").write_text("the card\n", encoding="utf-8")
    assert embedded.main([str(trained), str(folder)]) == 0
    before, after = hf_values(trained), hf_values(folder)
    assert before.keys() == after.keys()
    for name, value in after.items():
        assert value.dtype.name == "bfloat16"
        assert (value == before[name].astype(value.dtype)).all()
    regimes = read_questions(folder / "heldout.jsonl")
    assert {name: len(some) for name, some in regimes.items()} == embedded.QUESTIONS
    assert list(regimes) == list(REGIMES)
    assert all(is_heldout(one.prompt) for some in regimes.values() for one in some)
    names = ("tokenizer.json", "tokenizer_config.json")
    assert all((folder / name).read_bytes() == (trained / name).read_bytes() for name in names)
    assert (folder / "README.md").read_text(encoding="utf-8") == "the card\n"
    assert not list(tmp_path.glob("tmp*")), "nothing is left beside the folder"


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        embedded.main([str(tmp_path / "nowhere"), str(tmp_path / "embedded")])
