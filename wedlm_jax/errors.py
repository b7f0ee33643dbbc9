"""Error types, exit statuses, and helpers for messages."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


class InputError(ValueError):
    """The caller's input cannot be used. The message is one sentence that names the file, field or
    record and what was expected; the command line prints it and exits with `BAD_INPUT`."""


class BadData(InputError):
    """Too many records of the input cannot be used. The command line exits with `BAD_DATA`."""


class StorageFailure(Exception):
    """Storage refuses or does not answer, because of a network, permissions or a full disk.

    Neither the input nor the stored data is at fault, and the same call may succeed later. The
    message is one sentence that names the file and quotes the storage's error; the command line
    prints it and exits with `STORAGE_FAILED`.
    """


FAULT = 1
"""Exit status after any other exception."""
BAD_INPUT = 2
"""Exit status after `InputError`, and after options that cannot be parsed."""
BAD_DATA = 65
"""Exit status after `BadData`, and after a job without a good record: sysexits' EX_DATAERR."""
STORAGE_FAILED = 74
"""Exit status after `StorageFailure`: EX_IOERR of sysexits.h."""
INTERRUPTED, PIPE_CLOSED, TERMINATED = 130, 141, 143
"""Exit status after SIGINT, SIGPIPE and SIGTERM: 128 plus the signal's number. None is 0, so that a
script that waits for the command does not continue without its result."""

EXIT_STATUS = {
    0: "done; a server that got SIGTERM has finished its answers",
    FAULT: "an internal error, with a traceback",
    BAD_INPUT: "options, input or files cannot be used; the message is one sentence, and the same "
    "command would fail again",
    BAD_DATA: "a job's records are bad: all of them, the first 1,000, or more than --max-errors; "
    "what was decoded is kept",
    STORAGE_FAILED: "storage or a network refuses or does not answer, as with a full disk; the "
    "message is one sentence, and the same command may succeed later, resuming from what was kept",
    INTERRUPTED: "Ctrl-C (SIGINT); the same command resumes from what was kept, and a server has "
    "finished its answers",
    PIPE_CLOSED: "the reader of the output has gone (SIGPIPE)",
    TERMINATED: "SIGTERM, as before a preemption; the same command resumes from what was kept",
}
"""The meaning of every `wedlm` command's exit status, as printed in docs/reference.md. A restart
loop should continue after all but 0, `BAD_INPUT`, `BAD_DATA` and signals that somebody sent."""

CALLER_ERRORS = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
        *(errno.EACCES, errno.EPERM, errno.EROFS),
        *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL),
    }
)
"""Errors of a file system that are due to a wrong name or permission. All others (ENOSPC, EDQUOT,
EIO, ESTALE, ETIMEDOUT, ...) are due to its state, which may change."""


def is_passing(error: OSError) -> bool:
    """Returns whether the same call may succeed later, as with a full disk but not a wrong name."""
    return error.errno is not None and error.errno not in CALLER_ERRORS


def file_error(path: object, what: str, error: OSError) -> InputError | StorageFailure:
    """Returns the error to raise where a file system refuses ``what``, such as "cannot be
    written": `StorageFailure` if the same call may succeed later, else `InputError`."""
    kind = StorageFailure if is_passing(error) else InputError
    return kind(f"{path}: {what} ({error.strerror or shortened(str(error))})")


def exit_status(error: BaseException) -> int:
    """Returns the exit status, from `EXIT_STATUS`, of a command that ends with this error."""
    if isinstance(error, InputError):
        return BAD_DATA if isinstance(error, BadData) else BAD_INPUT
    if isinstance(error, CompilingInterrupted):
        return error.status
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return PIPE_CLOSED
    passing = isinstance(error, OSError) and is_passing(error)
    return STORAGE_FAILED if passing or isinstance(error, StorageFailure) else FAULT


class CompilingInterrupted(KeyboardInterrupt):
    """A signal has arrived while a program was being compiled. The command ends with exit status
    ``status``, because the compiler cannot be interrupted."""

    def __init__(self, status: int = INTERRUPTED):
        super().__init__("interrupted while compiling")
        self.status = status


_OTHER_NAMES = {
    # sampling: vLLM, transformers, llama.cpp, the PyTorch engine
    "entropy_threshold": "tau",
    "json_schema": "guided_decoding guided_json response_format structured_outputs",
    "logprobs": "output_scores top_logprobs",
    "max_tokens": "max_completion_tokens max_gen_toks max_new_tokens n_predict num_predict",
    "max_tokens max_model_len row_length": "max_length",
    "min_tokens": "min_length",
    "n": "best_of num_return_sequences num_samples",
    "position_penalty": "lambda pos_penalty_factor wedlm_pos_penalty_factor",
    "regex": "guided_regex",
    "repetition_penalty": "repeat_penalty",
    "sampling_params sampling": "params",
    "seed": "random_seed",
    "stop": "stop_sequences stop_strings",
    "stop_token_ids": "eos_token_id",
    "temperature": "do_sample temp",
    # the model and its engine
    "conversations": "messages",
    "dtype": "torch_dtype",
    "init_from model": "checkpoint model_name model_name_or_path model_path name_or_path "
    "pretrained",
    "init_from sources": "path",
    "max_batch_size batch_size": "max_num_seqs",
    "max_model_len": "ctx_size",
    "max_model_len row_length": "context_length max_seq_len max_seq_length",
    "mesh": "num_gpus",
    "mesh.data mesh": "data_parallel_size",
    "mesh.tensor mesh": "tensor_parallel_size tp",
    "on_progress": "use_tqdm",
    # training: the Trainer of transformers, PEFT, axolotl
    "accumulation": "grad_accum gradient_accumulation_steps",
    "b1": "adam_beta1 beta1",
    "b2": "adam_beta2 beta2",
    "branch_from": "resume_from_checkpoint",
    "checkpoint_every": "checkpoint_steps save_every save_steps",
    "clip_norm": "grad_clip max_grad_norm",
    "eps": "adam_epsilon",
    "evaluation.every": "eval_every eval_steps",
    "evaluation.rows": "per_device_eval_batch_size",
    "final_learning_rate": "min_lr",
    "init_from": "base_model",
    "keep_checkpoints": "save_total_limit",
    "learning_rate": "lr",
    "log_every": "logging_steps",
    "lora.rank": "lora_r",
    "loss.dtype dtype": "bf16 fp16 precision",
    "max_batch_size rows": "batch_size",
    "metrics.wandb": "report_to wandb_project",
    "optimizer.name": "optim",
    "output": "save_dir",
    "rank": "r",
    "remat": "gradient_checkpointing",
    "row_length": "cutoff_len seq_len seq_length sequence_len",
    "rows": "micro_batch_size per_device_train_batch_size train_batch_size",
    "schedule": "lr_scheduler lr_scheduler_type",
    "sources": "dataset datasets train_file",
    "steps": "epochs max_steps num_epochs num_train_epochs",
    "targets": "target_modules",
    "tokenizer": "tokenizer_name_or_path",
    "warmup_steps": "warmup_ratio",
    # commands
    "generate": "infer inference",
    "quit": "exit",
    "reset": "clear",
    "train": "finetune",
}
SYNONYMS = {other: meant for meant, others in _OTHER_NAMES.items() for other in others.split()}
"""Other programs' names, and the names used here. If there are several, the first that is known
where the name was given applies. Some include their section, since other names end the same."""

ABSENT = {
    "beam_width": "there is no beam search",
    "enforce_eager": "it is not needed: each forward is one of a few compiled programs",
    "gpu_memory_utilization": "it is not needed: pages use the memory that the model leaves",
    "num_beams": "there is no beam search",
    "swap_space": "it is not needed: what does not fit is recomputed later",
    "trust_remote_code": "it is not needed: code in a checkpoint is never run",
    "use_beam_search": "there is no beam search",
}
"""Options of other programs that have no equivalent here, and why."""


ALIKE = 0.6
"""The share of letters, or of words, that two names must have in common to count as similar."""


def nearest(name: str, known: Iterable[str], alike: float = ALIKE) -> str | None:
    """Returns the known name that an unknown one probably means: the equivalent of another
    program's name, or the most similar name; None if none is similar enough.

    Args:
      name: a name, a flag (``--max-new-tokens``), or a field with its section (``optimizer.lr``).
      known: known names of the same kind.
      alike: how similar they must be.
    """
    section, _, base = _plain(name).rpartition(".")
    parts = {one: _plain(one).rpartition(".") for one in known}

    synonyms = SYNONYMS.get(base, "").split()
    found = [one for other in synonyms for one in parts if other in (_plain(one), parts[one][2])]
    if found:
        same = [one for one in found if section and parts[one][0] == section]
        return (same or found)[0]

    def likeness(one: str) -> float:
        """Compares the names without their sections, with a bonus if the sections are the same."""
        other = parts[one][2]
        words, others = set(base.split("_")), set(other.split("_"))
        common = 2 * len(words & others) / (len(words) + len(others))
        letters = difflib.SequenceMatcher(None, base, other).ratio()
        return max(common, letters) + 0.1 * (section != "" and parts[one][0] == section)

    def closeness(one: str) -> float:
        of_sections = difflib.SequenceMatcher(None, section, parts[one][0]).ratio()
        return likeness(one) + 0.3 * of_sections

    best = max(parts, key=closeness, default=None)
    return best if best is not None and likeness(best) >= alike else None


def _plain(name: str) -> str:
    """Returns a name in lower case, without leading dashes or slashes, and with underscores."""
    return name.lstrip("-/").replace("-", "_").lower()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a hint for an unknown name: the probable name, or all known names."""
    names = list(known)
    if reason := ABSENT.get(_plain(name)):
        return reason
    near = nearest(name, names)
    return f"expected one of {', '.join(names)}" if near is None else f"did you mean {near!r}?"


def refuse_unknown(fields: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """Refuses a name that is not one of ``known``, with a hint."""
    for name in fields:
        if name not in known:
            shown = shortened(name, 60)
            raise InputError(f"unknown {what} {shown!r}; {did_you_mean(shown, known)}")


def written(number: float) -> str:
    """Formats a number for a message; integers have no exponent."""
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:g}"


def require_extra(what: str, extra: str, *packages: str) -> None:
    """Refuses, with an `InputError`, to start if packages are not installed.

    Args:
      what: what needs them; begins the sentence.
      extra: extra of this package that installs them.
      packages: the names under which they are imported.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise InputError(
            f"{what} needs {' and '.join(missing)}, which {are} not installed: "
            f'pip install "wedlm-jax[{extra}]"'
        )


@contextlib.contextmanager
def errors_at(place: object) -> Iterator[None]:
    """Prefixes the message of an `InputError` with the file or field at fault."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def shortened(text: str, length: int = 200) -> str:
    """Returns a text for use in a message: on one line, and cut to ``length`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."


def shown_value(value: Any) -> str:
    """Formats a value for a message, shortened."""
    try:
        # Parquet has values that JSON does not have, such as dates.
        return shortened(json.dumps(value, ensure_ascii=False, default=repr), 60)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def counted(number: int, what: str) -> str:
    """Returns a number with its noun: "1 record", "1,200 records"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
