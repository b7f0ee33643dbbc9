"""Fixtures for jobs: an empty working folder, jobs that are stopped early, and decoders that take
no time or record what they decode."""

import pytest

from tests.infer.job.job_examples import quick_run, run
from wedlm_jax.engine.engine import Engine
from wedlm_jax.llm import LLM


@pytest.fixture
def model(checkpoint):
    return checkpoint


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """An empty folder to work in, so that messages name files without their folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refusal(model, capsys):
    """Runs a job that ends early; returns the last line of what it prints."""

    def refused(*options, status=2, **paths):
        assert run(model, *options, **paths) == status
        return capsys.readouterr().err.splitlines()[-1]

    return refused


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
