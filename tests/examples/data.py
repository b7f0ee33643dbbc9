"""Small inputs and packed rows for the tests of training data."""

import atexit
import dataclasses
import functools
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np

from examples.embedded.corpus import generate
from train.data.batches import StepRows
from train.data.job import TokeniseOptions, tokenise
from train.data.samples import SampleOptions
from train.recipe.phases import phases_of

EMBEDDED = Path(__file__).parents[2] / "wedlm_jax" / "embedded"
ROW, BLOCK = 128, 32

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Count to 3."},
    {"role": "assistant", "content": "1, 2, 3"},
    {"role": "user", "content": "And back?"},
    {"role": "assistant", "content": "3, 2, 1"},
]


def silent(bytes_read, bytes_total, tokens):
    """Watches a job and says nothing."""


class NumberedRows:
    """Row i holds the number ``first + i`` everywhere."""

    def __init__(self, rows, first=0, length=4):
        self.rows, self.first, self.length = rows, first, length

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        number = np.full(self.length, self.first + int(index), np.int32)
        return {
            "tokens": number,
            "positions": number,
            "segment_ids": number * 2,
            "trainable": number % 2 == 0,
        }

    def place(self, index):
        return f"from {self.first}", index


def tokenizer_with(template, folder):
    """The embedded tokenizer in a folder of its own, with another chat template; None for none."""
    folder.mkdir(exist_ok=True)
    shutil.copy(EMBEDDED / "tokenizer.json", folder)
    settings = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def step_rows(sets, config):
    """The rows that the steps of a recipe read, given its sets of rows and their shares."""
    return StepRows(one_phase(sets, config), [sets])


def one_phase(sets, config):
    sources = {str(number): weight for number, (_, weight) in enumerate(sets)}
    data = dataclasses.replace(config.data, sources=sources)
    return phases_of(dataclasses.replace(config, data=data))


def options(inputs, output, **changes):
    """Rows of 128 in blocks of 32 with the embedded tokenizer; ``changes`` of either class."""
    names = {field.name for field in dataclasses.fields(SampleOptions)}
    samples = {name: changes.pop(name) for name in names & changes.keys()}
    return TokeniseOptions(
        inputs=tuple(map(str, inputs)),
        output=str(output),
        samples=SampleOptions(**{"tokenizer": str(EMBEDDED), "row_length": ROW, **samples}),
        **{"block_size": BLOCK, **changes},
    )


def tokenised(inputs, output, **changes):
    return tokenise(options(inputs, output, **changes), silent)


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def documents(count, seed=0, mean_words=60.0):
    """Texts whose lengths vary as those of web pages do: a few are very long."""
    random = np.random.default_rng(seed)
    words = ["count", "from", "the", "red", "box", "to", "nine", "and", "list", "each", "name"]
    lengths = 1 + random.lognormal(np.log(mean_words), 0.8, count).astype(int)
    return [{"text": " ".join(random.choice(words, length))} for length in lengths]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def corpus_rows(tokenizer, row_length=ROW, block_size=BLOCK):
    """A folder of rows with forty word problems, made once for each tokenizer and size."""
    digest = hashlib.sha256((tokenizer / "tokenizer.json").read_bytes()).hexdigest()[:16]
    folder = _corpus_folder() / f"{digest}-{row_length}-{block_size}"
    if not folder.exists():
        samples = generate(0, 40, split="train", weights={"reasoning": 1.0})
        chats = [sample.as_conversation() for sample in samples]
        records = write_jsonl(folder.with_suffix(".jsonl"), chats)
        sizes = {"tokenizer": str(tokenizer), "row_length": row_length, "block_size": block_size}
        tokenised([records], folder, **sizes)
    return folder


@functools.cache
def _corpus_folder():
    folder = tempfile.mkdtemp(prefix="wedlm-rows-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
