"""Records of every kind and of every wrong kind."""

import dataclasses
import gzip
import json
import shutil
import sys

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import wedlm_jax.records.jsonl
from tests.examples.data import CHAT, EMBEDDED, ROW, tokenizer_with, write_jsonl
from train.data.chunks import chunks, find_input, records
from train.data.samples import SampleMaker, SampleOptions
from train.data.tokenizer import load_tokenizer
from wedlm_jax.errors import InputError

MAKER = SampleMaker(SampleOptions(str(EMBEDDED), ROW))
END = MAKER.tokenizer.token_to_id("<|endoftext|>")


def chunks_of(path):
    (file,) = find_input([str(path)]).files
    return list(chunks(file))


def made_of(path, maker=MAKER):
    results = [maker.make(chunk) for chunk in chunks_of(path)]
    samples = [sample for result in results for sample in result.samples]
    malformed = [what for result in results for what in result.malformed]
    return samples, malformed, sum(result.counts.records for result in results)


def listed(samples):
    return [(sample.tokens.tolist(), sample.trainable.tolist()) for sample in samples]


def ids(text):
    return MAKER.tokenizer.encode(text, add_special_tokens=False).ids


def test_documents_end_with_the_end_of_text_and_token_ids_are_taken_as_they_are(tmp_path):
    text = "one two three four five six\n" * 60
    (tmp_path / "a.txt").write_text("\ufeff" + text, encoding="utf-8")
    records = [
        {"text": "Count to 3."},
        {"text": "1\n2", "id": 4},
        {"token_ids": list(range(ROW + 9))},
        {"token_ids": [5, 6, 7], "trainable": [False, True, 1]},
    ]
    made = [made_of(write_jsonl(tmp_path / "a.jsonl", records)), made_of(tmp_path / "a.txt")]
    samples = [sample for some, _, _ in made for sample in some]
    whole = [*ids(text), END]
    assert len(whole) > 2 * ROW, "longer than a row, it is cut"
    assert [sample.tokens.tolist() for sample in samples] == [
        [*ids("Count to 3."), END],
        [*ids("1\n2"), END],
        list(range(ROW)),
        list(range(ROW, ROW + 9)),
        [5, 6, 7],
        *(whole[start : start + ROW] for start in range(0, len(whole), ROW)),
    ]
    # All is trained on but what a record says is not.
    flags = [sample.trainable.tolist() for sample in samples if not sample.trainable.all()]
    assert flags == [[False, True, True]]
    assert [(malformed, count) for _, malformed, count in made] == [([], 4), ([], 1)]


def test_a_jobs_results_are_prompts_and_what_was_decoded(tmp_path):
    result = {"id": 1, "text": "x", "token_ids": [8, 9], "prompt_token_ids": [5, 6, 7]}
    many = {**result, "samples": [{"token_ids": [8, 9]}, {"token_ids": [4]}]}
    bad = [
        {"id": 2, "error": "no", "line": 3},
        {**result, "token_ids": []},
        {**result, "prompt_token_ids": [10**6]},
        {**result, "samples": [3]},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", [result, many, *bad])
    maker = SampleMaker(dataclasses.replace(MAKER.options, format="completions"))
    samples, malformed, _ = made_of(path, maker)
    two = ([5, 6, 7, 8, 9], [False, False, False, True, True])
    assert listed(samples) == [two, two, ([5, 6, 7, 4], [False, False, False, True])]
    assert [one.line for one in malformed] == [3, 4, 5, 6]
    _, refused, _ = made_of(write_jsonl(tmp_path / "b.jsonl", [{"token_ids": [1], "samples": 0}]))
    assert not refused


SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [turn for turn in CHAT if turn["role"] != "system"]
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}[turn["role"]], "value": turn["content"]}
    for turn in TURNS
]
TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {"to": 3}}}]
WITH_TOOLS = """\
{{ mood | default('') }}\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory):
    """Makes samples with a template that writes tools."""
    folder = tokenizer_with(WITH_TOOLS, tmp_path_factory.mktemp("tokenizer"))
    return SampleMaker(SampleOptions(str(folder), 512))


@pytest.mark.parametrize("format", ["auto", "chat"])
def test_sharegpt_conversations_are_the_same_and_a_system_message_beside_one_is_its_first(
    tmp_path, format
):
    named = [{"from": "system", "value": SYSTEM["content"]}, *SHAREGPT]
    with_system = [
        {"messages": [SYSTEM, *TURNS]},
        {"conversations": named},
        {"messages": TURNS, "system": "Be brief."},
        {"conversations": SHAREGPT, "system": "Be brief."},
        {"messages": [SYSTEM, *TURNS], "system": "Be brief."},
    ]
    without = [
        {"messages": TURNS},
        {"conversations": SHAREGPT},
        {"messages": TURNS, "system": ""},
        {"conversations": SHAREGPT, "system": ""},
    ]
    # A format that is asked for reads that key only.
    bad = [{"text": "a"}, {"token_ids": [1]}] if format == "chat" else []
    maker = SampleMaker(dataclasses.replace(MAKER.options, format=format))
    path = write_jsonl(tmp_path / "a.jsonl", [*with_system, *without, *bad])
    samples, malformed, _ = made_of(path, maker)
    made = listed(samples)
    assert made == [made[0]] * len(with_system) + [made[-1]] * len(without)
    assert made[0] != made[-1]
    assert [what.reason for what in malformed] == ["missing key"] * len(bad)


def test_tools_and_template_variables_are_in_the_text_or_the_record_is_named(tmp_path, with_tools):
    records = [
        {"messages": TURNS},
        {"messages": TURNS, "tools": TOOLS},
        {"conversations": SHAREGPT, "tools": json.dumps(TOOLS)},
        {"messages": TURNS, "tools": []},
        {"messages": TURNS, "tools": "", "chat_template_kwargs": {}},
        {"messages": TURNS, "tools": "none"},
        {"messages": TURNS, "tools": {"name": "count"}},
        {"messages": TURNS, "chat_template_kwargs": {"tokenize": True}},
        {"messages": TURNS, "chat_template_kwargs": "mood"},
        {"messages": TURNS, "chat_template_kwargs": {"mood": "two"}},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    samples, malformed, _ = made_of(path, with_tools)
    texts = [
        with_tools.tokenizer.decode(sample.tokens, skip_special_tokens=False) for sample in samples
    ]
    listed = f"<|im_start|>system\n{json.dumps(TOOLS[0])}<|im_end|>\n"
    assert texts[1] == texts[2] == listed + texts[0]
    assert texts[3:] == [texts[0], texts[0], "two" + texts[0]]
    assert [sample.trainable.sum() for sample in samples] == [samples[0].trainable.sum()] * 6
    assert [(what.line, what.reason) for what in malformed] == [
        (6, "wrong type"),
        (7, "wrong type"),
        (8, "not supported"),
        (9, "wrong type"),
    ]
    # Of a template that does not write them, nothing is made that lacks them.
    samples, malformed, _ = made_of(write_jsonl(path, records[:2]))
    assert len(samples) == 1
    reason = "tools not found in the chat template's text"
    assert [(what.line, what.reason) for what in malformed] == [(2, reason)]


def unread_of(path):
    return [MAKER.make(chunk).counts.unread_keys for chunk in chunks_of(path)]


def test_a_key_that_nothing_reads_is_counted(tmp_path):
    noted = [{**turn, "note": 1} for turn in SHAREGPT]
    records = [
        {"text": "a", "id": 1},
        {"text": "b", "id": 2, "source": "web"},
        {"text": "a", "output": "b", "input": "c"},
        {"messages": CHAT, "prompt": "Count to 3."},  # no pair
        {"conversations": noted, "id": 3},
        {"messages": [*CHAT[:-1], {**CHAT[-1], "weight": 1}]},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    samples, malformed, _ = made_of(path)
    assert (len(samples), malformed) == (6, [])
    read = {"id": 3, "source": 1, "output": 1, "input": 1, "prompt": 1, "conversations.note": 1}
    assert unread_of(path) == [read]


UNUSED = {"system": "Be brief.", "tools": TOOLS, "trainable": [1]}
LONG_CHAT = [*CHAT[:2], {"role": "assistant", "content": "one two " * ROW}]
PAIR = {"prompt": "Count to 3.", "completion": "1, 2, 3"}
RECORDS = [
    ({}, "missing key"),
    ({"prompt": "a"}, "missing key: 'prompt' without 'completion'"),
    ({"text": "a", "messages": CHAT}, "several formats"),
    ({**PAIR, "text": "c"}, "several formats"),
    ({"text": 3}, "wrong type"),
    ({"text": ""}, "empty"),
    ({"text": "half \ud83d"}, "not UTF-8"),
    *(({"text": "a", name: value}, "unused key") for name, value in UNUSED.items()),
    ({"messages": []}, "wrong type"),
    ({"messages": "hello"}, "wrong type"),
    ({"messages": ["hello"]}, "wrong type"),
    ({"messages": [{"role": "user"}]}, "wrong type"),
    ({"messages": [{"role": "assistant", "content": None}]}, "wrong type"),
    ({"messages": CHAT[:2]}, "no assistant turn"),
    ({"messages": LONG_CHAT}, "longer than a row"),
    ({"messages": CHAT, "trainable": [1]}, "unused key"),
    ({"messages": [*CHAT[:-1], {**CHAT[-1], "weight": 0}]}, "not supported"),
    ({"messages": [*CHAT, {"role": "asistant", "content": "b"}]}, "unknown role: 'asistant' of me"),
    ({"messages": [SYSTEM, *TURNS], "system": "Be long."}, "two system messages"),
    ({"messages": TURNS, "system": ["Be brief."]}, "wrong type"),
    ({"conversations": SHAREGPT, "system": ["Be brief."]}, "wrong type"),
    (
        {"conversations": [{"from": "robot", "value": "Hi."}]},
        "unknown speaker: 'from' of turn 1 mu",
    ),
    ({"conversations": [{"from": "human"}]}, "wrong type"),
    ({"conversations": [{"from": ["human"], "value": "Hi."}]}, "unknown speaker"),
    ({"conversations": {}}, "wrong type"),
    ({"conversations": ["hello"]}, "wrong type"),
    ({"conversations": SHAREGPT[:1]}, "no assistant turn"),
    ({"conversations": [*SHAREGPT[:-1], {**SHAREGPT[-1], "weight": 0}]}, "not supported"),
    ({**PAIR, "completion": ""}, "empty"),
    ({**PAIR, "prompt": ["a"]}, "wrong type"),
    ({"instruction": "Count to 3.", "input": 5, "output": "1"}, "wrong type"),
    ({"token_ids": []}, "empty"),
    ({"token_ids": "12"}, "wrong type"),
    ({"token_ids": [1, 2.5]}, "wrong type"),
    ({"token_ids": [1, True]}, "wrong type"),
    ({"token_ids": [1, 10**12]}, "unknown token"),
    ({"token_ids": [-1]}, "unknown token"),
    ({"token_ids": [1], "system": "Be brief."}, "unused key"),
    ({"token_ids": [1, 2], "trainable": [1]}, "wrong length"),
    ({"token_ids": [1, 2], "trainable": [0, 7]}, "wrong type"),
    ({"token_ids": [1, 2], "trainable": [0, 0]}, "nothing to train on"),
    ({"token_ids": [1] * 200, "trainable": [1] * 200}, "longer than a row"),
    ([1, 2], "not a JSON object"),
    ("text", "not a JSON object"),
    (None, "not a JSON object"),
    # Lines that are no records.
    (b"{", "not JSON: Expecting property name"),
    (b'{"text": "\xff\xfe"}', "not UTF-8"),
    (b'{"text": "' + b"x" * 10_000 + b'"}', "too long"),
    (b'{"token_ids": [' + b"9" * 2000 + b"]}", "unknown token"),
]


def test_every_malformed_record_is_named_and_the_good_ones_between_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(wedlm_jax.records.jsonl, "LARGEST_LINE", 3000)
    path = tmp_path / "a.jsonl"
    lines = [x if isinstance(x, bytes) else json.dumps(x).encode() for x, _ in RECORDS]
    # A mark at the start, and lines of nothing, are no records.
    marked = b"\xef\xbb\xbf" + b"".join(line + b'\n{"token_ids": [1, 2, 3]}\n' for line in lines)
    path.write_bytes(marked + b"\n   \n")
    samples, malformed, records = made_of(path)
    assert [what.line for what in malformed] == list(range(1, 2 * len(RECORDS), 2))
    for what, (_, reason) in zip(malformed, RECORDS, strict=True):
        assert f"{what.reason}: {what.detail}".startswith(reason), what
    assert str(malformed[0]).startswith(f"{path}:1: missing key (")
    assert len(samples) == len(RECORDS)
    assert records == 2 * len(RECORDS)


def test_files_that_cannot_be_read_are_named(tmp_path):
    pytest.importorskip("pyarrow")
    packed = gzip.compress(b'{"token_ids": [1]}\n' * 5000)
    contents = {
        "empty.jsonl": (b"", "the file is empty"),
        "empty.txt": (b"", "the file is empty"),
        "binary.txt": (b"\xff\x00\x01", "not UTF-8"),
        "zeros.txt": (b"\0" * 10, "not a text"),
        "cut.jsonl.gz": (packed[: len(packed) // 2], "the compressed data is damaged"),
        "plain.jsonl.gz": (b'{"token_ids": [1]}\n', "the compressed data is damaged"),
        "other.arrayrecord": (b"no records" * 100, "not an ArrayRecord file"),
        "short.arrayrecord": (b"no records", "not an ArrayRecord file"),
        "cut.parquet": (b"PAR1 no more", "not a Parquet file"),
    }
    for name, (content, reason) in contents.items():
        (tmp_path / name).write_bytes(content)
        _, malformed, _ = made_of(tmp_path / name)
        assert [(what.file, what.line, what.reason) for what in malformed] == [
            (str(tmp_path / name), 0, reason)
        ]


def test_compressed_lines_and_records_of_a_file_are_read_alike(tmp_path):
    lines = [json.dumps({"token_ids": [n % 50, 1]}).encode() for n in range(1300)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    writer = ArrayRecordWriter(str(tmp_path / "a.arrayrecord"), "group_size:1")
    for line in lines:
        writer.write(line)
    writer.close()
    for name in ("a.jsonl.gz", "a.arrayrecord"):
        samples, malformed, records = made_of(tmp_path / name)
        assert [int(sample.tokens[0]) for sample in samples] == [n % 50 for n in range(1300)]
        assert (malformed, records) == ([], 1300)
        size = (tmp_path / name).stat().st_size
        assert sum(chunk.bytes_read for chunk in chunks_of(tmp_path / name)) == size


def test_parquet_makes_the_rows_that_jsonl_makes(tmp_path):
    """As a table every row has all columns, and every message all fields."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    named = [{**turn, "name": "me"} if turn["role"] == "user" else turn for turn in CHAT]
    given = [
        {"messages": CHAT, "id": 1},
        {"text": "A text."},
        {"messages": named},
        {"token_ids": [4, 5, 6]},
        {"token_ids": [7, 8], "trainable": [False, True]},
        {"instruction": "Count to 3.", "output": "1, 2, 3", "id": 7},
        {"instruction": "Count", "input": "to 3.", "output": "1, 2, 3"},
        {"text": ""},
        {"other": 1},
    ]
    text, number = pa.string(), pa.int32()
    message = pa.struct([(field, text) for field in ("role", "content", "name")])
    columns = {"messages": pa.list_(message), "text": pa.large_string(), "other": pa.int8()}
    columns |= {"token_ids": pa.list_(number), "trainable": pa.list_(pa.bool_()), "id": number}
    columns |= dict.fromkeys(("instruction", "input", "output"), text)
    write_jsonl(tmp_path / "a.jsonl", given)
    table = pa.Table.from_pylist(given, pa.schema(list(columns.items())))
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    opened = (records(chunk) for chunk in chunks_of(tmp_path / "a.parquet"))
    kept = [{k: x for k, x in one.items() if k not in ("id", "other")} for one in given]
    assert [record for chunk in opened for _, record in chunk] == kept
    (samples, malformed, count), (others, other_malformed, other_count) = (
        made_of(tmp_path / name) for name in ("a.jsonl", "a.parquet")
    )
    assert count == other_count == len(given)
    assert listed(samples) == listed(others)
    wrong = [[(bad.line, bad.reason) for bad in some] for some in (malformed, other_malformed)]
    assert wrong == [[(8, "empty"), (9, "missing key")]] * 2
    assert unread_of(tmp_path / "a.parquet") == [{"id": 3, "other": 3}] * 3


def test_a_tokenizer_that_does_not_serve_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no tokenizer\.json in this folder"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer\.json: the tokenizer is truncated"):
        load_tokenizer(tmp_path)
    options = SampleOptions(str(EMBEDDED), ROW, document_end="<|none|>")
    with pytest.raises(InputError, match=r"the tokenizer has no <\|none\|>"):
        made_of(write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}]), SampleMaker(options))


def test_a_dataset_of_hugging_face_is_read_as_its_records(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"Count to {i}.", "id": i} for i in range(40)]
    rows += [{"text": None, "id": 40}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "texts", num_shards=2)
    chats = [{"messages": CHAT}, {"messages": CHAT[:3]}]
    both = datasets.DatasetDict({"train": datasets.Dataset.from_list(chats)})
    both.save_to_disk(tmp_path / "chats")
    # What `map` keeps beside the data is none of it.
    (tmp_path / "texts" / "cache-1.arrow").write_bytes(b"no table")
    monkeypatch.setattr("train.data.chunks.CHUNK_RECORDS", 16)
    samples, malformed, count = made_of(tmp_path / "texts")
    assert [MAKER.tokenizer.decode(sample.tokens) for sample in samples] == [
        f"Count to {i}." for i in range(40)
    ]
    assert [(what.line, what.reason) for what in malformed] == [(41, "missing key")]
    assert count == 41
    assert sum(unread["id"] for unread in unread_of(tmp_path / "texts")) == 41
    of_lines = made_of(write_jsonl(tmp_path / "chats.jsonl", chats))[0]
    assert listed(made_of(tmp_path / "chats" / "train")[0]) == listed(of_lines)
    with pytest.raises(InputError, match=r"several splits; name those to read: .*chats/train"):
        find_input([str(tmp_path / "chats")])
    shutil.copytree(tmp_path / "texts", tmp_path / "damaged")
    (tmp_path / "damaged" / "data-00001-of-00002.arrow").write_bytes(b"")
    assert [what.reason for what in made_of(tmp_path / "damaged")[1]] == ["not a dataset"]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r'datasets.* pip install "wedlm-jax\[datasets\]"'):
        find_input([str(tmp_path / "texts")])


PAIR_RECORDS = [
    PAIR,
    {"instruction": "Count to 3.", "input": "", "output": "1, 2, 3"},
    {"instruction": "Count to 3.", "output": "1, 2, 3", "id": 7},
    {"instruction": "Count", "input": "to 3.", "output": "1, 2, 3"},
    {**PAIR, "system": "Be brief."},
]


def test_a_prompt_and_its_completion_are_two_turns_of_the_template(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", PAIR_RECORDS)
    said = {"role": "assistant", "content": "1, 2, 3"}
    asked = [{"role": "user", "content": text} for text in ("Count to 3.", "Count\n\nto 3.")]
    chats = [{"messages": [*turns, said]} for turns in (asked[:1], asked[1:], [SYSTEM, asked[0]])]
    count, after_input, with_system = listed(made_of(write_jsonl(tmp_path / "b.jsonl", chats))[0])
    samples, malformed, _ = made_of(path)
    assert not malformed
    assert listed(samples) == [count, count, count, after_input, with_system]


@pytest.mark.parametrize(("on_prompt", "ends"), [(False, 1), (True, 3)])
def test_a_pair_is_plain_text_without_a_template(tmp_path, on_prompt, ends):
    folder = str(tokenizer_with(None, tmp_path / "tokenizer"))
    options = {"train_on_prompt": on_prompt, "end_tokens": ends - 1}
    maker = SampleMaker(SampleOptions(folder, ROW, document_end="<|endoftext|>", **options))
    samples, malformed, _ = made_of(write_jsonl(tmp_path / "a.jsonl", PAIR_RECORDS), maker)
    after = [*ids("1, 2, 3"), *[END] * ends]
    assert listed(samples) == [
        (before + after, [on_prompt] * len(before) + [True] * len(after))
        for before in map(ids, ["Count to 3."] * 3 + ["Count\n\nto 3."])
    ]
    assert [(what.line, what.reason) for what in malformed] == [(5, "unused key")]
