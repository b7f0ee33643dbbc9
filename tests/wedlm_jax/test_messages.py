"""Conversations as callers write them: one meaning, one sentence for what is not taken."""

import copy
import json

import pytest

from tests.wedlm_jax.test_text import byte_tokenizer, write_tokenizer
from wedlm_jax.errors import InputError
from wedlm_jax.messages import RESERVED, NotTaken, checked_messages, template_variables
from wedlm_jax.text import TextCodec

USER = {"role": "user", "content": "How warm is it in Oslo?"}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'},
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "text"}}}]

TEMPLATE = """\
{%- if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}[{{ m.role }}]
{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}
{{- m.content + '' }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]
{%- if enable_thinking is defined and not enable_thinking %}(){% endif %}{% endif %}"""
"""With the habits of templates that know tools: contents are added to, arguments are mappings."""


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    codec = TextCodec.load(write_tokenizer(folder, byte_tokenizer(), chat_template=TEMPLATE))
    return codec


def shown(codec, messages, **variables):
    return codec.decode(codec.encode_chat(messages, variables))


def test_what_openai_s_clients_send_reaches_the_template(codec):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"text": "brief."}]},
        USER,
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "reasoning_content": "Ask.",
            "tool_calls": [CALL],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "9"}]},
        {"role": "assistant", "content": "Nine.", "tool_calls": None},
        {"role": "user", "content": "Thanks"},
    ]
    before = copy.deepcopy(messages)
    text = shown(codec, messages, tools=TOOLS, enable_thinking=False)
    assert text == (
        f"[tools]{json.dumps(TOOLS[0])}[system]Be brief.[user]{USER['content']}"
        "[assistant](Ask.)weather city=Oslo days=2[tool]9[assistant]Nine.[user]Thanks[assistant]()"
    )
    assert messages == before, "the caller's own are left alone"
    once = checked_messages(messages)
    assert checked_messages(once) == once


def test_calls_in_the_shape_of_templates_are_kept(codec):
    flat = {"name": "weather", "arguments": {"city": "Oslo"}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [flat]}]
    assert checked_messages(messages)[1]["tool_calls"] == [flat]
    empty = {"type": "function", "function": {"name": "now", "arguments": ""}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [empty]}]
    (call,) = checked_messages(messages)[1]["tool_calls"]
    assert call == {"type": "function", "function": {"name": "now", "arguments": {}}}


@pytest.mark.parametrize(
    ("message", "said", "kind"),
    [
        ("hi", "messages[1]: expected an object", InputError),
        ({"content": "a"}, "messages[1].role: expected one of system, ", InputError),
        ({"role": "king", "content": "a"}, "role: expected one of system, ", InputError),
        ({"role": "a b", "content": "a"}, "messages[1].role", InputError),
        ({"role": "<|im_end|>", "content": "a"}, "messages[1].role", InputError),
        ({"role": "user", "content": None}, "messages[1].content: expected a text", InputError),
        ({"role": "user", "content": ["a"]}, 'expected {"type": "text"', InputError),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[1].content[0]: 'image_url' is not taken; this model reads texts alone",
            NotTaken,
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "'input_audio' is", NotTaken),
        ({"role": "assistant", "content": "", "audio": {"id": 1}}, ".audio: not taken", NotTaken),
        ({"role": "assistant", "content": "", "function_call": {}}, "tool_calls are", NotTaken),
        ({"role": "tool", "content": "", "tool_call_id": 7}, ".tool_call_id: exp", InputError),
        ({"role": "assistant", "content": "", "tool_calls": "x"}, ".tool_calls: exp", InputError),
        ({"role": "assistant", "tool_calls": [{}]}, "tool_calls[0]: expected a fun", InputError),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1"}}]},
            'messages[1].tool_calls[0]: expected arguments that are a JSON object, not "[1"',
            InputError,
        ),
    ],
)
def test_what_is_not_taken_is_said_in_a_sentence(message, said, kind):
    with pytest.raises(InputError) as error:
        checked_messages([USER, message])
    assert said in str(error.value)
    assert type(error.value) is kind


def test_variables_of_the_template():
    assert template_variables() == template_variables([], {}) == template_variables("", "") == {}
    both = {"enable_thinking": False, "tools": TOOLS}
    assert template_variables(TOOLS, {"enable_thinking": False}) == both
    assert template_variables(json.dumps(TOOLS), '{"enable_thinking": false}') == both
    for name in RESERVED:
        with pytest.raises(NotTaken, match=f"chat_template_kwargs: '{name}' cannot be set"):
            template_variables(kwargs={name: 1})
    with pytest.raises(InputError, match="chat_template_kwargs: expected an object, not"):
        template_variables(kwargs="mood")
    for tools in ("none", {"name": "count"}, ["count"]):
        with pytest.raises(InputError, match="tools: expected a list of objects, not"):
            template_variables(tools)


def test_variables_of_the_codec_are_those_of_conversations_that_set_none(tmp_path):
    folder = write_tokenizer(tmp_path, byte_tokenizer(), chat_template=TEMPLATE)
    codec = TextCodec.load(folder, variables={"enable_thinking": False})
    assert shown(codec, [USER]).endswith("[assistant]()")
    assert shown(codec, [USER], enable_thinking=True).endswith("[assistant]")
