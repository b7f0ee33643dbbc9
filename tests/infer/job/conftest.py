"""A tiny model, and an empty folder to work in."""

import pytest

from infer import generate
from infer.flags import LLM_OPTIONS
from tests.examples.decode import EVERYTHING
from tests.examples.tiny_checkpoint import write_tiny_checkpoint
from tests.infer.job.job_examples import quick_run
from wedlm_jax.engine.engine import Engine
from wedlm_jax.llm import LLM


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def llm(model):
    return expecting_everything(LLM(model, window_size=4, max_batch_size=4))


def expecting_everything(llm):
    """One program for whatever the tests ask for, in the place of one for each kind."""
    llm.engine.expect(EVERYTHING)
    return llm


@pytest.fixture(scope="session")
def loaded():
    return {}


@pytest.fixture(autouse=True)
def _load_once(loaded, monkeypatch):
    """A model that the command has loaded with the same options serves again: compiling it
    is what takes the time."""
    load = generate.load

    def cached(options):
        names = (*LLM_OPTIONS, "warmup", "max_tokens")
        key = repr([options.get(name) for name in names])
        if key not in loaded:
            loaded[key] = expecting_everything(load(options))
        return loaded[key]

    monkeypatch.setattr(generate, "load", cached)


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """An empty folder to work in, so that messages name files without their folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def never_decodes(monkeypatch):
    monkeypatch.setattr(Engine, "step", lambda *_, **__: pytest.fail("it ran"))


@pytest.fixture
def decoded(monkeypatch):
    """The prompts, as token ids, that have been decoded since."""
    prompts = []
    run = LLM.run

    def counting(self, records, *rest, **options):
        asked_for = []

        def noting():
            for record in records:
                asked_for.append(record)
                yield record

        for batch in run(self, noting(), *rest, **options):
            prompts.extend(list(asked_for[i][0]) for i, _ in batch)
            yield batch

    monkeypatch.setattr(LLM, "run", counting)
    return prompts


@pytest.fixture
def quick(monkeypatch):
    """Rows are not decoded, and come back at once."""
    monkeypatch.setattr(LLM, "run", quick_run)
