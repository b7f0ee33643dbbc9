"""What the tests of training share."""

import pytest

from examples.embedded.corpus import generate
from tests.examples.tiny_run import on_devices, tiny_recipe
from train.data.tokenizer import save_tokenizer, train_tokenizer
from train.loop import train as run_training


@pytest.fixture(scope="session", autouse=True)
def one_device():
    """Trains on one of the eight devices that the tests have, unless a test asks for others."""
    with pytest.MonkeyPatch.context() as patch:
        on_devices(patch, 1)
        yield


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = (f"{s.prompt}\n{s.answer}\n" for s in generate(0, 100, split="train"))
    save_tokenizer(train_tokenizer(texts, 300), folder)
    return folder


@pytest.fixture(scope="session")
def finished(tokenizer_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "uninterrupted"
    assert run_training(tiny_recipe(output, tokenizer_folder)) == output / "hf"
    return output
