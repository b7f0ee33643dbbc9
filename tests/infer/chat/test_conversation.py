"""A conversation: what the model is given, what the cache has of it, and what is forgotten."""

import itertools
import json

import pytest

from infer.chat.conversation import Conversation
from infer.chat.lines import ORDERS, follow
from tests.examples.tiny_checkpoint import CONTEXT
from wedlm_jax.completion import Completion
from wedlm_jax.errors import InputError
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

PARAMS = SamplingParams(max_tokens=24)


@pytest.fixture
def conversation(llm):
    return Conversation(llm, PARAMS, limited=True)


def ask(conversation, message):
    *_, last = conversation.answer(message)
    return last.completion


def asked(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def test_a_turn_computes_its_new_tokens_alone(llm, conversation):
    """The model is given what the template says, in the tokens that it has said itself."""
    llm.engine.scheduler.forget_prefixes()
    said, before = [], []
    for message in ("the cat sat on the mat", "one two", "three four"):
        text = conversation._rendered([*conversation.messages, *asked(message)])
        ids = conversation._encoded(text)
        # An answer may end within a character, which its text leaves out.
        assert llm.tokenizer.decode(ids).replace("\ufffd", "") == text.replace("\ufffd", "")
        assert ids[: len(said)] == said
        answer = ask(conversation, message)
        # Whole pages are kept, and the last token of a text is never one of theirs.
        page = llm.engine.settings.page_size
        assert answer.num_cached_tokens >= (len(before) - 1) // page * page
        _, before = conversation._past
        kept = answer.token_ids[: len(answer.token_ids) - (answer.finish_reason == "stop")]
        said = [*ids, *kept]
    assert answer.num_cached_tokens > 0


def test_a_system_message_stands_in_front_and_may_change(llm, conversation):
    ask(conversation, "the cat")
    conversation.system = "one two"
    answer = ask(conversation, "and?")
    with_system = Conversation(llm, PARAMS, limited=True, system="one two")
    with_system._messages = conversation._messages[:2]
    assert ask(with_system, "and?").token_ids == answer.token_ids


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(llm, conversation, monkeypatch):
    monkeypatch.setattr("wedlm_jax.llm.STREAM_SECONDS", 1e-9)  # a forward per burst
    whole = ask(conversation, "the cat")
    assert len(whole.token_ids) > 2
    conversation.reset()
    chunks = []
    for chunk in conversation.answer("the cat", stopping=lambda: bool(chunks)):
        chunks.append(chunk)
    last = chunks[-1].completion
    assert 0 < len(last.token_ids) < len(whole.token_ids)
    llm._loop.close()
    assert not llm.engine.has_work
    assert conversation.messages == asked("the cat", last.text)
    assert ask(conversation, "and?").num_forwards > 0


def test_an_answer_may_fill_the_context_unless_told(llm):
    long = Conversation(llm, SamplingParams(ignore_eos=True, max_tokens=1))
    answer = ask(long, "the cat")
    assert len(answer.token_ids) + len(llm.chat_prompt(asked("the cat"))) == CONTEXT


def test_a_way_out_of_a_loop_is_told_once(llm):
    endless, ended, stopped = (
        Completion("a", [7], reason, 1, 1) for reason in ("length", "stop", None)
    )
    greedy = Conversation(llm, SamplingParams())
    assert greedy.advice(ended) is None
    advice = greedy.advice(endless)
    assert advice.startswith("the answer ran to the end of the context; ")
    assert advice.endswith("try /temperature 0.7")
    assert greedy.advice(endless) is None
    assert Conversation(llm, SamplingParams()).advice(stopped) is not None
    assert Conversation(llm, SamplingParams(), limited=True).advice(endless) is None
    assert Conversation(llm, SamplingParams(temperature=0.7)).advice(endless) is None


def test_the_oldest_turns_leave_a_full_context_which_is_said_once(llm):
    told = []
    params = SamplingParams(ignore_eos=True, max_tokens=8)
    long = Conversation(llm, params, limited=True, system="be brief", tell=told.append)
    messages = [f"the cat {number}" for number in range(10, 40)]
    lengths = []
    for text in messages:
        assert len(ask(long, text).token_ids) == 8
        system, *others = long.messages
        assert system == {"role": "system", "content": "be brief"}
        assert [one["role"] for one in others] == ["user", "assistant"] * (len(others) // 2)
        lengths.append(len(others))
    assert told == [
        f"the context of {CONTEXT} tokens is full: from now on the oldest messages are dropped, "
        "and the model no longer sees them"
    ]
    kept = [one["content"] for one in long.messages if one["role"] == "user"]
    assert 0 < len(kept) < len(messages)
    assert kept == messages[-len(kept) :], "the newest stay"
    left = [b < a + 2 for a, b in itertools.pairwise(lengths)]
    assert 2 <= sum(left) < len(left) / 3, "several leave at once, and then none for a while"


def test_a_message_that_is_refused_or_stopped_before_its_answer_changes_nothing(llm, conversation):
    ask(conversation, "the cat")
    before = conversation.messages
    with pytest.raises(InputError, match=r"tokens leave no room for an answer in a context of 320"):
        ask(conversation, "one two " * CONTEXT)
    with pytest.raises(InputError, match="half of a surrogate pair"):
        ask(conversation, "the \udcff cat")  # such as a terminal of another encoding gives
    assert list(conversation.answer("the cat", stopping=lambda: True)) == []
    assert conversation.messages == before
    assert ask(conversation, "and?").num_cached_tokens > 0


def test_another_answer_takes_the_place_of_the_last(llm):
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=2**32 - 1)
    one = Conversation(llm, params, limited=True)
    with pytest.raises(InputError, match="/retry: there is no answer yet"):
        list(one.retry())
    ask(one, "the cat")
    before, first = one.messages, ask(one, "and?")
    *_, last = one.retry()
    assert last.completion.token_ids != first.token_ids
    assert one.messages[:-2] == before
    assert one.messages[-2:] == asked("and?", last.completion.text or "")
    kept = one.messages
    assert list(one.retry(stopping=lambda: True)) == []
    assert one.messages == kept, "if nothing comes, what was there stays"
    one.reset()
    with pytest.raises(InputError, match="/retry: there is no answer yet"):
        list(one.retry())


def test_a_conversation_is_saved_once(llm, conversation, tmp_path):
    conversation.system = "be brief"
    answer = ask(conversation, "thé cat").text or ""
    file = tmp_path / "chat.jsonl"
    assert follow(f"/save {file}", conversation, llm) == f"3 messages in {file}"
    (line,) = file.read_text(encoding="utf-8").splitlines()
    expected = [{"role": "system", "content": "be brief"}, *asked("thé cat", answer)]
    assert json.loads(line) == {"messages": expected}
    with pytest.raises(InputError, match=f"^/save: {file} already exists$"):
        follow(f"/save {file}", conversation, llm)
    with pytest.raises(InputError, match="No such file"):
        follow(f"/save {tmp_path}/none/a.json", conversation, llm)
    assert file.read_text(encoding="utf-8").splitlines() == [line]


def test_without_a_template_messages_are_completed(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    conversation = Conversation(llm, PARAMS, limited=True)
    assert not conversation.has_template
    (expected,) = llm.generate("the cat", PARAMS)
    ask(conversation, "one two")
    assert ask(conversation, "the cat").text == expected.text
    monkeypatch.setattr(llm, "codec", None)
    with pytest.raises(InputError, match="no tokenizer"):
        Conversation(llm, PARAMS)


# --- orders -------------------------------------------------------------------------------


ORDER_BY_ORDER = [
    ("/mode", "mode verified"),
    ("/mode ar", "mode ar"),
    ("/window", "window 4"),
    ("/window 2", "window 2"),
    ("/temperature", "temperature 0"),
    ("/temperature 0.7", "temperature 0.7"),
    ("/system be brief", "the system message is set"),
    ("/system", "no system message"),
    ("/reset ", "forgotten"),
]


def test_orders_change_what_follows(llm, conversation):
    for line, reply in ORDER_BY_ORDER:
        assert follow(line, conversation, llm) == reply
        if line == "/mode ar":
            assert ask(conversation, "the cat").tokens_per_forward == 1
        if line == "/system be brief":
            assert conversation.system == "be brief"
    assert (conversation.window, conversation.params.temperature) == (2, 0.7)
    assert (conversation.messages, conversation.system) == ([], "")
    listed = follow("/help", conversation, llm)
    assert all(order in listed for order in ORDERS)
    with pytest.raises(EOFError):
        follow("/quit", conversation, llm)


WINDOWS = [
    ("wedlm", "auto", "/window auto", "window auto"),
    ("qwen3", None, "/window auto", "window 0: {name} was not trained on masks"),
    ("qwen3", None, "/window 8", "/window: expected 0, not 8: this model was not trained on"),
    ("wedlm", 0, "/window 8", "/window: expected 0, not 8: this model has no windows"),
]


@pytest.mark.parametrize(("model_type", "window", "line", "reply"), WINDOWS)
def test_windows_that_are_no_number(checkpoint, stock, model_type, window, line, reply):
    folder = checkpoint if model_type == "wedlm" else stock
    llm = LLM(folder, window_size=window)
    conversation = Conversation(llm, PARAMS)
    try:
        answer = follow(line, conversation, llm)
    except InputError as error:
        answer = str(error)
    assert answer.startswith(reply.format(name=folder))
    assert conversation.window is None


BAD_ORDERS = {
    "/mode fast": "mode: expected one of",
    "/window 5": "/window: expected 0 to 4",
    "/window auto": "/window: auto needs a chat that was started with --window-size auto",
    "/window x": "/window: expected a number",
    "/temperature hot": "/temperature: expected a number, not 'hot'",
    "/temperature -1": "temperature: expected a number from 0",
    "/temp 1": "no command '/temp'; did you mean '/temperature'",
    "/exit": "no command '/exit'; did you mean '/quit'",
    "/retry it": "/retry: expected nothing after it, not 'it'",
    "/save": "/save: expected the name of a file",
    "/rest": "no command '/rest'; did you mean '/reset'",
    "/nonsense": "no command '/nonsense'; /help lists them",
    "/": "no command '/'; /help lists them",
}


def test_orders_that_cannot_be_followed_are_told(llm, conversation):
    for line, message in BAD_ORDERS.items():
        with pytest.raises(InputError, match=f"^{message}"):
            follow(line, conversation, llm)
        assert (conversation.params, conversation.window) == (PARAMS, None)
