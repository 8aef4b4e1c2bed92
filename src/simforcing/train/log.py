"""What a run writes about itself: JSON lines always, TensorBoard where it is installed, Weights & Biases if asked."""

import json
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from simforcing.train.directory import append_row, cut_log

Tracker = Callable[[int, dict[str, float]], None]
GIB = 2**30


class Log:
    """Rows of one run. A process that is not `main` writes none."""

    def __init__(self, out: Path, step: int, main: bool = True, wandb: str | None = None) -> None:
        self.file = out / "log.jsonl"
        self._trackers: list[Tracker] = []
        self._main = main
        if main:
            cut_log(self.file, step)
            self._trackers = [t for t in (tensorboard(out, step), weights_and_biases(out, wandb)) if t is not None]

    def write(self, row: dict[str, Any]) -> None:
        """Adds a row; numbers that are not finite become null.

        Raises:
            SimForcingError: it cannot be written.
        """
        if not self._main:
            return
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        append_row(self.file, row)
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
        for tracker in self._trackers:
            tracker(int(row["step"]), numbers)


def tensorboard(out: Path, step: int) -> Tracker | None:
    """Writes OUT/tensorboard; what a killed run wrote there after `step` is hidden. None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    writer: Any = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1, flush_secs=10)

    def track(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return track


def weights_and_biases(out: Path, project: str | None) -> Tracker | None:
    """A run named by `out` in this project, continued where it exists; None without a project.

    Raises:
        ModuleNotFoundError: `wandb` is not installed.
    """
    if project is None:
        return None
    import wandb

    settings = json.loads((out / "run.json").read_text()) if (out / "run.json").exists() else {}
    name = out.resolve().name
    run: Any = wandb.init(project=project, name=name, id=name, dir=str(out), config=settings, resume="allow")
    return lambda step, numbers: run.log(numbers, step=step)


class Clock:
    """Seconds spent in the parts of a step, on the device that does the work, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spent: dict[str, list[tuple[Any, Any]]] = {}
        self._last: Any = None

    def start(self) -> None:
        """A step begins."""
        self._last = self._now()

    def mark(self, part: str) -> None:
        """What was done since the last mark was this part."""
        now = self._now()
        self._spent.setdefault(part, []).append((self._last, now))
        self._last = now

    def read(self, steps: int) -> dict[str, float]:
        """Mean seconds a step in each part since the last reading. Waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        mean = {k: sum(self._between(*s) for s in spans) / max(steps, 1) for k, spans in self._spent.items()}
        self._spent.clear()
        return {f"seconds_{k}": float(f"{v:.3g}") for k, v in mean.items()}

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, a: Any, b: Any) -> float:
        return float(a.elapsed_time(b)) / 1000 if self._cuda else float(b - a)


def memory_gib(device: torch.device) -> float:
    """Most memory used so far, GiB: allocated on a GPU, or resident."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / GIB, 3)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB, 3)
