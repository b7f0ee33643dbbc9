"""A model that `lm_eval` can evaluate: answers and log-probabilities, batched by the engine."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, warning_once

from wedlm_jax.engine.config import ENGINE_OPTIONS
from wedlm_jax.errors import InputError, did_you_mean
from wedlm_jax.generation import Prepared
from wedlm_jax.host.progress import ProgressBar
from wedlm_jax.llm import LLM
from wedlm_jax.params import OPTIONS, SamplingParams, sample_seed

SCORED_AT_ONCE = 256
"""Texts scored between two updates of the progress bar and of the cache of answers."""

MAX_TOKENS = 256
"""Length of answers if a task does not set it, as in the harness itself."""

AXES = ("tensor_parallel_size", "data_parallel_size")
"""Options that set the engine's ``mesh``, which cannot be written as text."""
ENGINE_NAMES = (*(name for name in ENGINE_OPTIONS if name not in ("mesh", "max_batch_size")), *AXES)
NAMES = ("max_gen_toks", *ENGINE_NAMES, *OPTIONS)

NOT_SAMPLING = ("until", "max_gen_toks", "do_sample")
"""Generation arguments of the harness that are not fields of `SamplingParams`."""

Pair = tuple[list[int], list[int]]
"""Token ids of a context and of its continuation."""

logger = logging.getLogger(__name__)


@register_model("wedlm")
class HarnessModel(TemplateLM):
    """A checkpoint as a model of `lm_eval`: ``--model wedlm --model_args pretrained=DIR,...``.

    Log-probabilities are those of the autoregressive rows, from which AR decoding would choose, in
    every mode.

    Args:
      pretrained: a folder, a hub id, or an `LLM`; the included model by default.
      batch_size: maximum number of sequences that decode together; "auto" is the default of `LLM`.
      device: not used; JAX decodes on the devices that it finds.
      options: options of `LLM` and `SamplingParams`, by their names, such as ``mode="paper"``;
        ``tensor_parallel_size`` and ``data_parallel_size`` set the mesh, and ``max_gen_toks``
        limits answers of tasks that set no limit.

    Raises:
      InputError: an option is unknown or wrong; the message names it.
    """

    def __init__(
        self,
        pretrained: str | Path | LLM | None = None,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ):
        super().__init__()
        for name in options:
            if name not in NAMES:
                raise InputError(f"unknown model argument {name!r}; {did_you_mean(name, NAMES)}")
        limit = options.pop("max_gen_toks", MAX_TOKENS)
        sampling = {"max_tokens": limit}
        sampling |= {name: options.pop(name) for name in OPTIONS if name in options}
        SamplingParams(**sampling)  # checked before the model is loaded
        if not isinstance(pretrained, LLM):
            options |= _sequences(batch_size, max_batch_size)
            pretrained = _loaded(pretrained, options)
        self.llm = pretrained
        self.params = dataclasses.replace(self.llm.default_params, **sampling)
        if self.llm.codec is None:
            raise InputError(f"{self.llm.name} has no tokenizer, which tasks need")
        self.tokenizer = self.llm.tokenizer
        self._totals = Counter[str]()
        self._seconds = 0.0

    # --- what the harness asks of a model --------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        ids = self.llm.engine.config.eos_token_ids
        found = self.tokenizer.eos_token_id
        if found is None and not ids:
            raise InputError(f"{self.llm.name}: expected a token that ends or begins a text")
        return int(ids[0] if found is None else found)

    @property
    def prefix_token_id(self) -> int:
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def max_length(self) -> int:
        """Maximum number of prompt and completion tokens."""
        return self.llm.engine.max_model_len

    @property
    def tokenizer_name(self) -> str:
        return str(self.llm.folder).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        if add_special_tokens is None:
            # A chat template writes the first token itself.
            first = self.tokenizer.bos_token
            add_special_tokens = not (first and string.startswith(first))
        encoded = self.tokenizer(string, add_special_tokens=add_special_tokens)
        return list(encoded["input_ids"])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns a conversation as text. Without ``add_generation_prompt``, the last message (the
        assistant's) is left open for continuation."""
        codec = self.llm.codec
        if codec is None or not codec.has_chat_template:
            raise InputError(f"{self.llm.name} has no chat template: evaluate without it")
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **codec.variables,
                continue_final_message=not add_generation_prompt,
            )
        )

    def get_model_info(self) -> dict[str, Any]:
        """Returns what the results report about the model and its decoding so far."""
        engine, count = self.llm.engine, self._totals
        return {
            "model_num_parameters": engine.num_parameters,
            "model_dtype": self.llm.dtype,
            "mode": self.params.mode,
            "window_size": engine.window_size,
            "completion_tokens": count["tokens"],
            "num_forwards": count["forwards"],
            "tokens_per_forward": count["tokens"] / max(count["forwards"], 1),
            "p_cache": count["tokens"] / max(count["instances"], 1),
            "tokens_per_second": count["tokens"] / max(self._seconds, 1e-9),
        }

    # --- log-probabilities -----------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Returns the log-probability of each continuation, and whether greedy AR decoding would
        produce it.

        Args:
          requests: for each, its texts as key of the answer cache, or None; context and
            continuation ids.
        """
        pairs = self._fitting([(context, tokens) for _, context, tokens in requests])
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        # Texts of similar length are scored together, as they are padded to the same length.
        order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
        with ProgressBar("texts", total=len(order)) as bar:
            for start in range(0, len(order), SCORED_AT_ONCE):
                batch = order[start : start + SCORED_AT_ONCE]
                scored = self.llm.score(
                    [pairs[i][0] for i in batch], [pairs[i][1] for i in batch], top=1
                )
                for i, places in zip(batch, scored, strict=True):
                    chosen = zip(pairs[i][1], places, strict=True)
                    greedy = all(place.top[0][0] == token for token, place in chosen)
                    results[i] = (sum(place.logprob for place in places), greedy)
                    if (texts := requests[i][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, results[i])
                bar.update(start + len(batch))
        return results

    def _fitting(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Returns pairs that fit into the model's context: one that is too long loses the beginning
        of its own context."""
        fitting, num_cut = [], 0
        for context, continuation in pairs:
            room = self.max_length - len(continuation)
            if room < 1:
                raise InputError(
                    f"a continuation of {len(continuation)} tokens and one token of its context do "
                    f"not fit into the model's {self.max_length}"
                )
            num_cut += len(context) > room
            fitting.append((context[-room:] or [self.prefix_token_id], continuation))
        _tell_cut(num_cut, len(fitting))
        return fitting

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-probability of each text; every token is conditioned on as much of the
        text before it as the model's context holds."""
        windows: list[Pair] = []
        counts = []
        for (text,) in (request.args for request in requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            before = len(windows)
            windows += map(make_disjoint_window, rolling)
            counts.append(len(windows) - before)
        scored = iter(
            self._loglikelihood_tokens(
                [(None, context, tokens) for context, tokens in windows], disable_tqdm
            )
        )
        results = [sum(next(scored)[0] for _ in range(count)) for count in counts]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    # --- answers ---------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns a completion of each context, without the text that stopped it."""
        prepared = self._prepared(requests)
        texts = [""] * len(requests)
        clock = self.llm.engine.clock()
        with ProgressBar("answers", total=len(requests)) as bar:
            answered = 0
            for done in self.llm.run(prepared):
                for i, completion in done:
                    texts[i] = completion.text or ""
                    self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
                    self._totals["tokens"] += len(completion.token_ids)
                    self._totals["forwards"] += completion.num_forwards
                    self._totals["instances"] += completion.num_token_instances
                answered += len(done)
                left = clock.seconds * (len(requests) / answered - 1) if answered else None
                bar.update(answered, seconds_left=left)
        self._seconds += clock.seconds
        return texts

    def _prepared(self, requests: Iterable[Instance]) -> list[Prepared]:
        """Returns token ids and sampling parameters. A request that comes several times gets other
        random numbers each time; a prompt that is too long loses its beginning."""
        times: Counter[str] = Counter()
        prepared, num_cut = [], 0
        for context, arguments in (request.args for request in requests):
            key = repr((context, arguments))
            params = self._sampling(arguments, times[key])
            times[key] += 1
            room = self.max_length - params.max_tokens
            if room < 1:
                raise InputError(
                    f"answers of {params.max_tokens} tokens leave no room for a prompt in the "
                    f"model's {self.max_length}; max_gen_toks limits answers"
                )
            ids = self.tok_encode(context)
            num_cut += len(ids) > room
            ids = ids[-room:] or [self.prefix_token_id]
            prepared.append(self.llm.prepare_one(ids, params))
        _tell_cut(num_cut, len(prepared))
        return prepared

    def _sampling(self, arguments: dict[str, Any], repeat: int) -> SamplingParams:
        """Returns the sampling parameters of a request from its task's arguments, under the
        harness's names, and the number of equal requests before it."""
        given: dict[str, Any] = dict(normalize_gen_kwargs(arguments, self.params.max_tokens))
        fields = {name: given.pop(name) for name in OPTIONS if name in given}
        for name in given.keys() - NOT_SAMPLING:
            warning_once(logger, f"generation argument {name}={given[name]!r} is not used")
        if given["do_sample"] and "temperature" not in fields:
            fields["temperature"] = self.params.temperature or 1.0
        fields["max_tokens"] = given["max_gen_toks"]
        stop = fields.get("stop") or self.params.stop
        others = (stop,) if isinstance(stop, str) else stop
        fields["stop"] = (*filter(None, given["until"]), *others)
        params = dataclasses.replace(self.params, **fields)
        if params.temperature > 0 and params.seed is not None:
            params = dataclasses.replace(params, seed=sample_seed(params.seed, repeat))
        return params


def _loaded(pretrained: str | Path | None, options: dict[str, Any]) -> LLM:
    """Returns the model, on a mesh of the two sizes that other models of the harness take."""
    mesh = {
        axis: options.pop(name)
        for axis in ("tensor", "data")
        if (name := f"{axis}_parallel_size") in options
    }
    return LLM(pretrained, mesh=mesh or None, **options)


def _sequences(batch_size: int | str | None, most: int | None) -> dict[str, int]:
    """Returns the argument of `LLM` for this batch size; none to use its default."""
    if batch_size is None or str(batch_size).startswith("auto"):
        return {} if most is None else {"max_batch_size": most}
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
        raise InputError(f"batch_size: expected 1 or more, or auto, not {batch_size!r}")
    return {"max_batch_size": int(batch_size)}


def _tell_cut(count: int, total: int) -> None:
    if count:
        logger.warning(
            "%d of %d texts are longer than the model's context and lost their beginnings",
            count,
            total,
        )
