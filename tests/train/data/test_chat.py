"""Which tokens of a conversation are trained on."""

import json

import jinja2
import numpy as np
import pytest

from tests.examples.data import CHAT, EMBEDDED
from train.data.chat import ChatFormat, Wrong
from train.data.tokenizer import CHAT_TEMPLATE, load_tokenizer
from wedlm_jax.errors import InputError

# As Qwen3's: thoughts of earlier turns are left out, the last turn always has some.
THINKING = """\
{%- set last = namespace(user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- if m.role == 'assistant' and loop.index0 > last.user %}
{%- set said = '<think>\\n' + (m.content.split('</think>')[0].split('<think>')[-1].strip('\\n')
    if '</think>' in m.content else '') + '\\n</think>\\n\\n' + said %}
{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + said + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


TOKENIZER = load_tokenizer(EMBEDDED)


def chat_of(source, end_tokens=0):
    made = jinja2.Environment().from_string(source)

    def render(messages, ask, variables):
        return made.render(messages=messages, add_generation_prompt=ask, **variables)

    return ChatFormat(render, TOKENIZER, end_tokens)


def decoded(tokens):
    return TOKENIZER.decode(tokens.tolist(), skip_special_tokens=False)


def trained(chat, messages):
    """The texts of the trainable runs."""
    sample = chat.tokenised(*chat.turns(messages), train_on_prompt=False)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.trainable, [0]])))
    return [decoded(sample.tokens[start:stop]) for start, stop in edges.reshape(-1, 2)]


def test_each_assistants_turn_is_trainable_and_nothing_else_is():
    chat = chat_of(CHAT_TEMPLATE)
    sample = chat.tokenised(*chat.turns(CHAT), train_on_prompt=False)
    # Drawn by hand: the text, and below each character whether it is trained on.
    parts = [
        ("<|im_start|>system\nBe brief.<|im_end|>\n", False),
        ("<|im_start|>user\nCount to 3.<|im_end|>\n", False),
        ("<|im_start|>assistant\n", False),
        ("1, 2, 3<|im_end|>", True),
        ("\n<|im_start|>user\nAnd back?<|im_end|>\n", False),
        ("<|im_start|>assistant\n", False),
        ("3, 2, 1<|im_end|>", True),
    ]
    assert decoded(sample.tokens) == "".join(text for text, _ in parts)
    assert trained(chat, CHAT) == [text for text, flag in parts if flag]
    ends = TOKENIZER.token_to_id("<|im_end|>")
    assert (sample.tokens == ends).sum() == 5
    assert sample.trainable[sample.tokens == ends].tolist() == [False, False, True, False, True]


def test_end_tokens_are_added_and_the_prompt_is_trained_on_if_asked_for():
    chat = chat_of(CHAT_TEMPLATE, end_tokens=3)
    end = "<|im_end|>"
    assert trained(chat, CHAT) == ["1, 2, 3" + 4 * end, "3, 2, 1" + 4 * end]
    chat = chat_of(CHAT_TEMPLATE)
    sample = chat.tokenised(*chat.turns(CHAT), train_on_prompt=True)
    assert sample.trainable.all()
    assert decoded(sample.tokens) == chat.turns(CHAT)[0]


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "x",
        "ends in <|im_end|>",
        "  spaces  ",
        "two\nlines\n",
        "Hi.",
        "<|im_start|>assistant\n",
        "z<|im_end|>\n<|im_start|>user\nAnd back?",
    ],
)
def test_no_answer_hides_its_own_end(answer):
    chat = chat_of(CHAT_TEMPLATE)
    messages = [*CHAT[:2], {"role": "assistant", "content": answer}, *CHAT[3:]]
    whole, spans = chat.turns(messages)
    assert [whole[slice(*span)] for span in spans] == [answer + "<|im_end|>", "3, 2, 1<|im_end|>"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}",
            "with a special token",
        ),
        (
            "{{ messages|length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>"
            "{% endfor %}",
            "differently once the turn is there",
        ),
    ],
)
def test_a_template_that_hides_the_turns_is_refused(source, reason):
    with pytest.raises(InputError, match=f"chat template cannot be trained on: .*{reason}"):
        chat_of(source)


def test_one_conversation_that_hides_its_turns_is_told_apart():
    chat = chat_of("{% if messages|length > 4 %}long {% endif %}" + CHAT_TEMPLATE)
    assert trained(chat, CHAT[:3]) == ["1, 2, 3<|im_end|>"]
    with pytest.raises(Wrong, match="turns not found"):
        chat.turns(CHAT)


def test_a_template_that_rewrites_turns_is_followed_and_they_are_found():
    thought = {"role": "assistant", "content": "<think>\nup\n</think>\n\n1, 2, 3 "}
    messages = [*CHAT[:2], thought, *CHAT[3:]]
    chat = chat_of(THINKING)
    assert chat.changed(messages, *chat.turns(messages)) == [
        ("<think>\nup\n</think>\n\n1, 2, 3", "1, 2, 3"),
        ("3, 2, 1", "<think>\n\n</think>\n\n3, 2, 1"),
    ]
    assert trained(chat, messages) == [
        "1, 2, 3 <|im_end|>",
        "<think>\n\n</think>\n\n3, 2, 1<|im_end|>",
    ]
    assert trained(chat, messages[:3]) == ["<think>\nup\n</think>\n\n1, 2, 3 <|im_end|>"]
    plain = chat_of(CHAT_TEMPLATE)
    assert plain.changed(messages, *plain.turns(messages)) == []
    assert chat.turn_end == plain.turn_end == TOKENIZER.token_to_id("<|im_end|>")
    # Thoughts in a key of their own are the template's to write.
    own = {**CHAT[-1], "reasoning_content": "down"}
    assert chat.changed([*CHAT[:-1], own], *chat.turns([*CHAT[:-1], own])) == []


CALLING = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.arguments | tojson }}</call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("said", ["", "Wait. "])
@pytest.mark.parametrize("city", ["Oslo", "x", "a<|im_end|>", 7, ["y", "other"]])
@pytest.mark.parametrize("thinks", ["", "<think>\n\n</think>"])
def test_a_turn_that_calls_tools_is_trained_on_whole(said, city, thinks):
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({}, {"c": city})]
    asked = [*CHAT[:2], {"role": "assistant", "content": said, "tool_calls": calls}]
    last = "{% if m.role == 'assistant' %}" + thinks + "{% endif %}{{ m.content }}"
    chat = chat_of(CALLING.replace("{{ m.content }}", last))
    written = json.dumps({"c": city})
    written = written.replace("<", "\\u003c").replace(">", "\\u003e")  # by Jinja's own filter
    for messages in (asked, [*asked, {"role": "tool", "content": "9"}, CHAT[-1]]):
        whole, spans = chat.turns(messages)
        turn = f"{thinks}{said}<call>{{}}</call><call>{written}</call><|im_end|>"
        assert whole[slice(*spans[0])] == turn
        assert len(spans) == 1 + (len(messages) > 3)
        if not thinks:
            assert chat.changed(messages, whole, spans) == []
