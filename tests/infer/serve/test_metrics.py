"""What Prometheus is told."""

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.infer.serve.running_server import MODEL


def scraped(server):
    """Every sample, by its name and labels."""
    answer = httpx2.get(f"{server.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(answer.text))
    assert len({family.name for family in families}) == len(families) > 25
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_counts_are_those_of_what_was_asked(server, client):
    before = scraped(server)
    httpx2.get(f"{server.url}/nowhere")
    answer = client.completions.create(
        model=MODEL, prompt=["Once upon", "One day"], max_tokens=12, n=2, temperature=0.7
    )
    with pytest.raises(Exception, match="top_p"):
        client.completions.create(model=MODEL, prompt="x", top_p=9)
    after = scraped(server)

    def new(name, **labels):
        key = (f"wedlm_{name}", tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0)

    figures = answer.usage.model_extra
    assert new("completion_tokens_total") == answer.usage.completion_tokens
    assert new("prompt_tokens_total") == answer.usage.prompt_tokens
    assert new("sequence_forwards_total") == figures["num_forwards"]
    assert new("token_instances_total") == figures["num_token_instances"]
    assert new("time_to_first_token_seconds_count") == new("sequence_seconds_count") == 4
    assert new("inter_token_seconds_count") > 0
    assert new("forwards_total") > 0
    for source in ("masks", "lookup"):
        assert new("drafts_total", of=source) == figures["drafts"][source]
        assert new("drafts_accepted_total", of=source) == figures["drafts"][f"{source}_accepted"]
    assert figures["drafts"]["masks"] > 0
    assert new("calls_total", path="/v1/completions", status="200") == 1
    assert new("calls_total", path="/v1/completions", status="400") == 1
    assert new("calls_total", path="other", status="404") == 1
    assert new("errors_total") == 0
    assert after[("wedlm_engine_up", ())] == 1
    assert after[("wedlm_sequences_running", ())] == after[("wedlm_sequences_waiting", ())] == 0
    pages = [after[("wedlm_pages", (("of", kind),))] for kind in ("running", "prefixes", "free")]
    assert pages[0] == 0
    assert sum(pages) == server.service.engine.counters.pages
    assert server.service.engine.counters.pages > 0
