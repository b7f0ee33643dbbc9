"""A JSONL file of prompts in, a JSONL file of completions out; stopped jobs go on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from infer.job_fingerprint import fingerprint
from infer.job_progress import Standing, progress
from infer.part_file import PartFile, part_path
from infer.prompt_rows import PromptRow, prepare_rows, read_rows
from wedlm_jax import __version__
from wedlm_jax.errors import InputError

if TYPE_CHECKING:
    from wedlm_jax.llm import LLM, Completion, Progress, Row
    from wedlm_jax.sampling import SamplingParams

INTERRUPTED = 130


class FileJob:
    """One input file, one output file, and how rows that do not say otherwise are decoded.

    Args:
      input_file, output_file: JSONL; see `wedlm generate --help`.
      params: sampling parameters of the command line.
      chat: texts are a user's message, for the chat template.

    Raises:
      InputError: the files cannot be read or written, or are the same.
    """

    def __init__(self, input_file: str, output_file: str, params: SamplingParams, *, chat: bool):
        self.input, self.output = Path(input_file), Path(output_file)
        self.params, self.chat = params, chat
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._check_files()

    def run(self, load: Callable[[], LLM]) -> int:
        """Decodes what is not decoded yet; returns the exit status.

        Args:
          load: the model, once the rows have been read.

        Raises:
          InputError: before anything is decoded or written, if any row cannot be decoded.
        """
        rows, input_digest = read_rows(self.input, self.params)
        if not rows:
            part = PartFile(self.output, input_digest, 0)
            self._say_what_was_found(part)
            part.finish()
            self._say(f"{self.input} has no rows, and so has {self.output} now")
            return 0
        llm = load()
        prepared = prepare_rows(llm, self.input, rows, chat=self.chat)
        identity = fingerprint(input_digest, llm.folder, self._settings(llm))
        part = PartFile(self.output, identity, len(rows))
        self._say_what_was_found(part)
        try:
            standing = self._decode(llm, rows, prepared, part)
        except KeyboardInterrupt:
            self._say(f"interrupted: {self._kept(part)}; the same command goes on from there")
            return INTERRUPTED
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise InputError(
                f"the device has not enough memory for {llm.max_batch_size} rows at a time, try a "
                f"smaller --batch-size; {self._kept(part)}"
            ) from None
        finally:
            part.close()
        self._say(_summary(self.output, standing))
        return 0

    def _decode(
        self, llm: LLM, rows: list[PromptRow], prepared: list[Row], part: PartFile
    ) -> Standing:
        """Runs the missing rows, keeping each batch as it is done, and writes the output."""
        earlier = part.done
        missing = [i for i in range(len(rows)) if i not in earlier]
        compiled, started = llm.engine.compile_seconds, time.monotonic()

        def standing(now: Progress | None) -> Standing:
            compiling = llm.engine.compile_seconds - compiled
            finished, tokens, forwards = (
                (now.finished, now.tokens, now.forwards) if now else (0, 0, 0)
            )
            return Standing(
                len(earlier) + finished, len(earlier), len(rows), tokens, forwards,
                time.monotonic() - started - compiling, compiling,
            )  # fmt: skip

        last: Progress | None = None
        self._say(
            f"{len(missing):,} rows to decode, {llm.max_batch_size} at a time; compiling first"
        )
        with progress(self.console) as show:

            def on_progress(now: Progress) -> None:
                nonlocal last
                last = now
                show(standing(now))

            for batch in llm.run([prepared[i] for i in missing], on_progress):
                done = {missing[i]: completion for i, completion in batch}
                part.add({i: _result(rows[i], done[i]) for i in done})
            final = standing(last)
        part.finish()
        return final

    def _settings(self, llm: LLM) -> dict[str, Any]:
        """All that changes a result beside input and model: batches do not."""
        return {
            "version": __version__,
            "params": dataclasses.asdict(self.params),
            "chat": self.chat,
            "window_size": llm.engine.window_size,
            "refill": llm.engine.refill,
            "dtype": llm.dtype,
        }

    def _check_files(self) -> None:
        if not self.input.exists():
            raise InputError(f"{self.input}: no such file")
        if self.input.is_dir():
            raise InputError(f"{self.input}: expected a JSONL file, but this is a folder")
        if not self.output.parent.is_dir():
            raise InputError(f"{self.output}: there is no folder {self.output.parent}")
        if self.output.exists() and not self.output.is_file():
            raise InputError(f"{self.output}: not a file that could be replaced")
        for path in (self.output, part_path(self.output)):
            if path.exists() and path.samefile(self.input):
                raise InputError(f"{path}: input and output are the same file")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def _say_what_was_found(self, part: PartFile) -> None:
        if part.dropped:
            self._say(
                f"{part.path} held {part.dropped:,} rows of another input or other settings; "
                "beginning anew"
            )
        elif part.done:
            self._say(f"going on behind {self._kept(part)}")

    def _kept(self, part: PartFile) -> str:
        return f"{len(part.done):,} of {part.total:,} rows kept in {part.path}"


def _result(row: PromptRow, completion: Completion) -> dict[str, Any]:
    return {
        "id": row.id,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "num_forwards": completion.num_forwards,
        "num_token_instances": completion.num_token_instances,
    }


def _summary(output: Path, standing: Standing) -> str:
    earlier = f" ({standing.earlier:,} of them from before)" if standing.earlier else ""
    return (
        f"{output}: {standing.total:,} rows{earlier}, {standing.tokens:,} tokens in "
        f"{standing.seconds:.1f} s ({standing.speed()}), after {standing.compile_seconds:.1f} s "
        "of compiling"
    )
