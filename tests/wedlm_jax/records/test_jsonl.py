"""Lines with the places where they begin, and the objects in them."""

import hashlib
import io
import json

import pytest

from wedlm_jax.records import jsonl
from wedlm_jax.records.jsonl import BadRecord, Line, parse_object, read_lines

CONTENT = b'\xef\xbb\xbf{"a": 1}\n\n  \t\n{"b": "\xc3\xa9"}\r\n{"c": 3}'


def test_lines_have_their_places_and_blank_ones_are_left_out():
    lines = list(read_lines(io.BytesIO(CONTENT)))
    assert lines == [
        Line(0, 1, b'{"a": 1}\n'),
        Line(17, 4, b'{"b": "\xc3\xa9"}\r\n'),
        Line(30, 5, b'{"c": 3}'),
    ]


def test_reading_goes_on_from_any_place():
    lines = list(read_lines(io.BytesIO(CONTENT)))
    for first, line in enumerate(lines):
        stream = io.BytesIO(CONTENT)
        stream.seek(line.at)
        assert list(read_lines(stream, line.at, line.number)) == lines[first:]


@pytest.mark.parametrize("longest", [5, 9, 10, 1000])
def test_a_line_that_is_too_long_is_read_past_and_the_digest_has_every_byte(longest, monkeypatch):
    monkeypatch.setattr(jsonl, "LARGEST_LINE", longest)
    content = b"short\n" + b"x" * 9 + b"\n" + b"y" * 300 + b"\nz"
    digest = hashlib.sha256()
    lines = list(read_lines(io.BytesIO(content), digest=digest))
    assert digest.digest() == hashlib.sha256(content).digest()
    whole = content.splitlines(keepends=True)
    assert [line.content for line in lines] == [
        line if len(line) <= longest else None for line in whole
    ]
    assert [line.at for line in lines] == [0, 6, 16, 317]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b'  {"a": [1, {"b": null}]} \r\n', {"a": [1, {"b": None}]}),
        ('{"é": "日本"}'.encode(), {"é": "日本"}),
        (b'{"a": "\\ud83d\\ude00 \\\\ud800"}', {"a": "😀 \\ud800"}),
        (b'{"a": {"x": 1}, "b": {"x": 1}}', {"a": {"x": 1}, "b": {"x": 1}}),
        (b'{"big": 123456789012345678901234567890}', {"big": 123456789012345678901234567890}),
    ],
)
def test_objects_are_read(line, value):
    assert parse_object(line) == value


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (None, "too long", "more than 32 MiB in a line"),
        (b'{"a": 1', "not JSON", "Expecting ',' delimiter at column 8"),
        (b'{"a": 1} {"b": 2}', "not JSON", "Extra data at column 10"),
        (b'{"a": "b', "not JSON", "Unterminated string starting at column 7"),
        (b'{"a": NaN}', "not JSON", "NaN is not a JSON number"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "not JSON", "duplicate key 'c'"),
        (b"[" * 100_000, "not JSON", "maximum recursion depth exceeded"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON", "Exceeds the limit"),
        (b"[1, 2]", "not a JSON object", "[1, 2]"),
        (b'"' + b"x" * 100 + b'"', "not a JSON object", '"' + "x" * 56 + "..."),
        (b'{"a": "\xff"}', "not UTF-8", "byte 7; another encoding or binary"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8", "UTF-16 or binary data"),
        (b'{"a": "\0"}', "not UTF-8", "UTF-16 or binary data"),
        (b'{"a": "\\ud83d"}', "not UTF-8", "half of a surrogate pair, \\ud800 to \\udfff"),
        (b'{"\\uDC00": 1}', "not UTF-8", "half of a surrogate pair, \\ud800 to \\udfff"),
    ],
)
def test_bad_records_have_a_reason_to_count_by(line, reason, detail):
    with pytest.raises(BadRecord) as refused:
        parse_object(line)
    assert refused.value.reason == reason
    assert refused.value.detail.startswith(detail)
    assert str(refused.value) == f"{reason} ({refused.value.detail})"
    assert len(str(refused.value)) < 300


def test_what_json_writes_is_read_back():
    value = {"text": "a\u2028b\ud7ff\ue000😀", "list": [1, -2.5, True, None, {"x": []}]}
    for ascii_only in (True, False):
        line = json.dumps(value, ensure_ascii=ascii_only).encode() + b"\n"
        assert parse_object(line) == value
