"""`wedlm evaluate --tasks`: evaluates a model on tasks of lm-evaluation-harness."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infer.generate import load
from wedlm_jax.errors import InputError, require_extra, shortened
from wedlm_jax.host.atomic import written_beside

TASKS = Path(__file__).with_name("tasks")
"""The project's own tasks."""


def run_tasks(options: Mapping[str, Any]) -> int:
    """Evaluates a model on tasks; prints the harness's own table of scores.

    Raises:
      InputError: a task is unknown, its data cannot be loaded, or the model refuses it.
    """
    require_extra("--tasks", "eval", "lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.utils import handle_non_serializable, make_table

    from infer.harness.model import HarnessModel

    manager, names = _tasks(options)
    model = HarnessModel(load(dict(options)), **_sampling(options))
    results = simple_evaluate(
        model,
        tasks=names,
        num_fewshot=options["num_fewshot"],
        limit=options["limit"],
        log_samples=options["log_samples"],
        apply_chat_template=options["apply_chat_template"],
        gen_kwargs={"max_gen_toks": options["max_tokens"]} if "max_tokens" in options else None,
        task_manager=manager,
        confirm_run_unsafe_code=options["run_code"],
    )
    assert results is not None, "one process has the results"
    print(make_table(results))
    if "groups" in results:
        print(make_table(results, "groups"))
    _tell_decoding(model)
    if options["output"] is not None:
        text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
        with written_beside(Path(options["output"])) as file:
            file.write(text.encode("utf-8") + b"\n")
    return 0


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    thresholds = options.get("entropy_threshold", ())
    if len(thresholds) > 1:
        raise InputError("--entropy-threshold: expected one value with --tasks")
    named = {name: options[name] for name in ("mode", "position_penalty") if name in options}
    return named | ({"entropy_threshold": thresholds[0]} if thresholds else {})


def _tasks(options: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Returns the task manager, and the names of the requested tasks."""
    from lm_eval.tasks import TaskManager

    class Tasks(TaskManager):  # type: ignore[misc]
        """Turns exceptions from loading a task into an `InputError`."""

        def load(self, task_list: Any) -> Any:
            try:
                return super().load(task_list)
            except InputError:
                raise
            except Exception as error:
                # Tasks run their own code and fetch data with other libraries.
                reason = shortened(f"{type(error).__name__}: {error}")
                raise InputError(f"--tasks: cannot load {task_list} ({reason})") from error

    folders = options["include_path"]
    for folder in folders:
        if not Path(folder).is_dir():
            raise InputError(f"--include-path {folder}: no such folder")
    names = [name for given in options["tasks"] for name in given.split(",")]
    paths, metadata = [TASKS, *folders], {"run_code": options["run_code"]}
    # Reading the harness's own tasks (thousands) takes a quarter of a minute.
    manager = Tasks(include_path=paths, metadata=metadata, include_defaults=False)
    if not all(_is_file(name) or manager.match_tasks([name]) for name in names):
        manager = Tasks(include_path=paths, metadata=metadata)
    found = [task for name in names for task in _matching(name, manager)]
    return manager, list(dict.fromkeys(found))


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _matching(name: str, manager: Any) -> list[str]:
    """Returns the tasks that match a name or a pattern such as ``mmlu_*``."""
    if _is_file(name):
        if not Path(name).is_file():
            raise InputError(f"--tasks {name}: no such file")
        return [name]
    if found := manager.match_tasks([name]):
        return list(found)
    near = difflib.get_close_matches(name, manager.all_tasks, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`lm_eval ls tasks` lists them"
    raise InputError(f"--tasks: no task {name!r}; {hint}")


def _tell_decoding(model: Any) -> None:
    info = model.get_model_info()
    if info["num_forwards"]:
        print(
            f"{info['completion_tokens']} tokens in {info['num_forwards']} forwards "
            f"({info['tokens_per_forward']:.2f} tokens per forward, p_cache "
            f"{info['p_cache']:.2f}), {info['tokens_per_second']:,.0f} tokens/s after compiling",
            file=sys.stderr,
        )
