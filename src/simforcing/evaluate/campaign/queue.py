"""Units of work shared by processes that know nothing of each other but a folder.

A process takes the first unit that is not done, whose needs are, and that nobody holds. It holds a unit by the lock of
a file, which the system releases however the process ends.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simforcing.evaluate.campaign.plan import Unit
from simforcing.train.directory import append_row

LOG = "units.jsonl"
"""What was done when, and how long it took; a line a unit."""
_LOCKS = "locks"


def missing(out: Path, units: Sequence[Unit]) -> list[Unit]:
    """The units that are not done."""
    return [unit for unit in units if not (out / unit.file).exists()]


def work(out: Path, units: Sequence[Unit], do: Callable[[Unit], None], pause: float = 1.0) -> int:
    """Does units until none is missing, waiting for those that others hold; returns how many were done here.

    Raises:
        SimForcingError: whatever a unit raises; what it had begun is taken up by the next call.
    """
    done = 0
    while waiting := missing(out, units):
        if _one_of(out, waiting, do):
            done += 1
        else:
            time.sleep(pause)
    return done


def _one_of(out: Path, waiting: Sequence[Unit], do: Callable[[Unit], None]) -> bool:
    for unit in waiting:
        if (out / unit.file).exists() or not all((out / need).exists() for need in unit.needs):
            continue
        with held(out, unit) as ours:
            if not ours or (out / unit.file).exists():
                continue
            began, spent = time.perf_counter(), time.process_time()
            do(unit)
            row = {"unit": unit.file, "seconds": round(time.perf_counter() - began, 3), "ended": round(time.time())}
            append_row(out / LOG, row | {"cpu_seconds": round(time.process_time() - spent, 3)})
            return True
    return False


@contextmanager
def held(out: Path, unit: Unit) -> Iterator[bool]:
    """Whether this process holds the unit inside; False where another does. (Windows lacks such locks: always True.)"""
    if sys.platform == "win32":
        yield True
        return
    import fcntl

    folder = out / _LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / unit.file.replace("/", "-")).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def spent(out: Path) -> list[dict[str, Any]]:
    """The log: what was done; a torn last line is left out."""
    rows = []
    file = out / LOG
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
