"""Models for `lm_eval`, and tasks whose data lies beside them: nothing is fetched."""

import json
import os
import tempfile

import pytest

pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")

# Read when `datasets` is imported, which is below.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="wedlm-datasets-")
os.environ["HF_DATASETS_OFFLINE"] = "1"

from infer.harness.model import HarnessModel

TEXTS = ("the cat sat on the mat", "one two three", "12 + 30 = 42", "日本語", "a", "naïve café")

WRITE = """\
task: write
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSE = """\
task: choose
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: [" one", " cat", " 42"]
doc_to_target: 1
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
READ = """\
task: read
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
"""


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    """A folder with a task of each kind, over one JSONL file."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
    for task in (WRITE, CHOOSE, READ):
        name = task.split()[1]
        whole = f"{task}{source}test_split: test\nmetadata: {{version: 1.0}}\n"
        (folder / f"{name}.yaml").write_text(whole, encoding="utf-8")
    return folder


def loaded(checkpoint, load_once, batch_size):
    """A model of a short context, as the command loads it."""
    shape = {"window_size": 4, "max_model_len": 64, "batch_size": batch_size}
    return load_once({"model": str(checkpoint), **shape})


@pytest.fixture(scope="session")
def model(checkpoint, load_once):
    return HarnessModel(loaded(checkpoint, load_once, 4))


@pytest.fixture(scope="session")
def one_at_a_time(checkpoint, load_once):
    return loaded(checkpoint, load_once, 1)
