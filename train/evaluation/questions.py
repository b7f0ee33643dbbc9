"""Questions that a run is asked on its way: read and drawn when it starts, judged each time."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from train.evaluation.decoding import At, decode_all
from train.recipe.config import EvaluationSection, TrainConfig
from train.watch.records import Record
from wedlm_jax.checkpoint.hf import copy_tokenizer
from wedlm_jax.engine.engine import Engine
from wedlm_jax.errors import InputError
from wedlm_jax.generation import complete
from wedlm_jax.host.storage import folder_of_this_machine, is_remote
from wedlm_jax.params import SamplingParams
from wedlm_jax.records.questions import Question, Tally, read_questions, tally
from wedlm_jax.text import TextCodec


def drawn_questions(section: EvaluationSection) -> list[Question]:
    """Reads the questions of a recipe and draws by its seed those that are asked, regime by regime
    in the order of the file; none where the recipe names no file.

    Raises:
      InputError: naming the file, the line and the field of what is no question.
    """
    if section.questions is None or not section.every:
        return []
    path = folder_of_this_machine(section.questions, "evaluation.questions")
    try:
        regimes = read_questions(path)
    except InputError as error:
        raise InputError(f"evaluation.questions: {error}") from None
    found = [question for some in regimes.values() for question in some]
    drawn = np.random.default_rng(section.seed).permutation(len(found))[: section.most_questions]
    return [found[i] for i in sorted(drawn)]


class AskedQuestions:
    """Questions as token ids, and how they are answered.

    Args:
      questions: at least one.
      codec: text codec of the model.
      params: how each is answered.
      room: the most tokens of a prompt and its answer.

    Attributes:
      longest: tokens of the longest prompt and of an answer.

    Raises:
      InputError: naming the line of a prompt that is empty, has no room, or that the tokenizer
        refuses.
    """

    def __init__(
        self, questions: Sequence[Question], codec: TextCodec, params: SamplingParams, room: int
    ):
        self._questions, self.codec, self._params = questions, codec, params
        self._regimes = list(dict.fromkeys(question.regime for question in questions))
        self._prompts = [question.encode(codec) for question in questions]
        for question, prompt in zip(questions, self._prompts, strict=True):
            with question.named():
                if not prompt:
                    raise InputError("prompt: expected at least one token")
                if len(prompt) + params.max_tokens > room:
                    raise InputError(
                        f"a prompt of {len(prompt)} tokens and evaluation.answer_tokens="
                        f"{params.max_tokens} do not fit into the model's context of {room}"
                    )
        self.longest = max(map(len, self._prompts)) + params.max_tokens

    def __len__(self) -> int:
        return len(self._questions)

    def answer(self, engine: Engine, first: int, every: int, at: At) -> np.ndarray:
        """Has every ``every``-th question answered, from number ``first`` on; ``at`` is told how
        many are.

        Returns:
          int64 ``[regimes, fields of Tally]``; the sum of all processes' is that of all questions.
        """
        questions = self._questions[first::every]
        results = decode_all(engine, self._prompts[first::every], self._params, at, "questions")
        answers = [complete(self.codec, result, self._params) for result in results]
        counts = []
        for regime in self._regimes:
            own = [i for i, question in enumerate(questions) if question.regime == regime]
            counted = tally([questions[i] for i in own], [answers[i] for i in own])
            counts.append(dataclasses.astuple(counted))
        return np.array(counts, np.int64)

    def record(self, counts: np.ndarray) -> Record:
        """Returns the scores for the sum of all processes' `answer`."""
        by_regime = [Tally(*row) for row in counts.tolist()]
        whole = Tally(*counts.sum(axis=0).tolist())
        record: Record = {}
        if whole.accuracy is not None:
            record["question_accuracy"] = whole.accuracy
        if len(by_regime) > 1:
            for regime, own in zip(self._regimes, by_regime, strict=True):
                if own.accuracy is not None:
                    record[f"question_accuracy/{regime}"] = own.accuracy
        return record | {
            "question_tokens_per_forward": whole.tokens / max(whole.forwards, 1),
            "questions": whole.questions,
            "questions_cut": whole.cut,
        }


def asked_questions(
    config: TrainConfig, questions: Sequence[Question], folder: Path, context: int
) -> AskedQuestions | None:
    """Prepares `drawn_questions` for a recipe's model; None where there are none.

    Args:
      folder: folder of the tokenizer.
      context: the model's.

    Raises:
      InputError: as `AskedQuestions`.
    """
    if not questions:
        return None
    section = config.evaluation
    mode = section.mode if config.objective == "wedlm" else "ar"
    params = SamplingParams(max_tokens=section.answer_tokens, mode=mode)
    with tempfile.TemporaryDirectory() as copy:
        if is_remote(folder):
            copy_tokenizer(folder, Path(copy))
            folder = Path(copy)
        codec = TextCodec.load(folder)
    assert codec is not None, "the run has loaded its tokenizer from there"
    return AskedQuestions(questions, codec, params, context)
