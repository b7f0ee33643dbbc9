"""The load client counts what a correct server sends; the report describes a server under load."""

import asyncio
import json

import pytest

from benchmarks.load_client import Ask, Heard, ask_all
from benchmarks.serve_load import BETWEEN, FIRST, draw_loads, load_of
from wedlm_jax.errors import InputError

REFUSAL = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


def event(data):
    line = b"data: " + json.dumps(data).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(line), line)


def choice(token_ids, finish_reason=None):
    return {"choices": [{"token_ids": token_ids, "finish_reason": finish_reason}]}


async def answer(reader, writer):
    """Says the prompt in pieces of two tokens, request by request, until the client leaves."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.partition(b"Content-Length: ")[2].split()[0])
            prompt = json.loads(await reader.readexactly(length))["prompt"]
            if not prompt:
                writer.write(REFUSAL)
                continue
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for start in range(0, len(prompt), 2):
                ends = "length" if start + 2 >= len(prompt) else None
                writer.write(event(choice(prompt[start : start + 2], ends)))
            if prompt == [9]:
                writer.write(event({"error": {"message": "it broke"}}))
            writer.write(b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def heard_from(asks, clients):
    """What the clients heard, and over how many connections."""
    connections = []

    async def counted(reader, writer):
        connections.append(writer)
        await answer(reader, writer)

    async def run():
        async with await asyncio.start_server(counted, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            heard, seconds = await ask_all(port, asks, clients)
            assert seconds > 0
            return heard

    return asyncio.run(run()), len(connections)


def test_every_answer_is_heard_in_its_place_over_connections_that_stay():
    prompts = [list(range(1, 2 + number)) for number in range(8)]
    heard, connections = heard_from([Ask({"prompt": prompt}) for prompt in prompts], clients=3)
    assert [one.token_ids for one in heard] == prompts
    assert {(one.finish_reason, one.error) for one in heard} == {("length", None)}
    assert all(one.first > 0 for one in heard)
    assert [len(one.gaps) for one in heard] == [(len(prompt) - 1) // 2 for prompt in prompts]
    assert connections == 3


def test_who_goes_away_has_heard_a_part_and_comes_back_over_another_connection():
    asks = [Ask({"prompt": [1, 2, 3, 4, 5]}, leave_after=3), Ask({"prompt": [6]})]
    (left, stayed), connections = heard_from(asks, clients=1)
    assert (left.token_ids, left.finish_reason, left.error) == ([1, 2, 3, 4], None, None)
    assert (stayed.token_ids, stayed.finish_reason) == ([6], "length")
    assert connections == 2


def test_refusals_and_errors_are_told():
    (refused, broken), _ = heard_from([Ask({"prompt": []}), Ask({"prompt": [9]})], clients=1)
    assert refused.error.startswith("HTTP/1.1 400")
    assert broken.error == "it broke"


def test_speeds_are_of_all_answers_together():
    heard = [Heard([1] * 3, first, [0.5, 1.5], "length") for first in (1.0, 2.0, 9.0)]
    load = load_of(2, heard, 4.5, (8.0, 4.0), 0.1)
    assert (load["requests"], load["tokens/s"]) == (3, 2.0)
    assert (load["of the job's"], load["of one as wide"]) == (0.25, 0.5)
    times = [load[f"{what}, {how}"] for what in (FIRST, BETWEEN) for how in ("ms", "95 %")]
    assert times == pytest.approx([2000, 8300, 1000, 1500])


def test_a_call_that_failed_is_named():
    heard = [Heard([1], finish_reason="stop"), Heard(error="it broke"), Heard(error="it too")]
    with pytest.raises(InputError, match="2 calls failed; the first: it broke"):
        load_of(1, heard, 1.0, (1.0, 1.0), 0.1)


def test_times_are_drawn(tmp_path):
    heard = [Heard([1] * 2, 1.0, [0.5], "length")]
    draw_loads([load_of(n, heard, 1.0, (1.0, 1.0), 0.1) for n in (1, 4)], tmp_path / "load.svg")
    drawn = (tmp_path / "load.svg").read_text(encoding="utf-8")
    assert all(f"ms {what}" in drawn for what in (FIRST, BETWEEN))
