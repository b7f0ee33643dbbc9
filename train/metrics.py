"""What a run says of itself: a metrics line a person reads and a JSONL a program reads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class MetricsLog:
    """Progress bar with ETA on a terminal, plain lines elsewhere, ``metrics.jsonl`` always."""

    def __init__(self, folder: Path, total_steps: int, done: int, title: str):
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._console = Console()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._progress.start()
        self._task = self._progress.add_task(title, total=total_steps, completed=done, line="")
        self._total, self._last = total_steps, (time.monotonic(), done)

    def write(self, step: int, metrics: dict[str, float], tokens_per_step: int) -> None:
        """Logs one line; tokens/s is over the steps since the last."""
        now = time.monotonic()
        seconds, steps = now - self._last[0], step - self._last[1]
        self._last = (now, step)
        speed = steps * tokens_per_step / max(seconds, 1e-9)
        record: dict[str, Any] = {"step": step, **metrics, "tokens_per_second": round(speed, 1)}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        line = " ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        line += f" {speed:,.0f} tokens/s"
        self._progress.update(self._task, completed=step, line=line)
        if not self._console.is_terminal:
            left = (self._total - step) * seconds / max(steps, 1)
            print(f"step {step}/{self._total} {line} ETA {left / 60:.1f} min", flush=True)

    def close(self) -> None:
        self._progress.stop()
        self._file.close()
