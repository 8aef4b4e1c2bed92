"""A run's directory: whose it is, and its log.

It holds `run.json` (what defines the run), `environment.jsonl` (code and machine, a line each time they change),
`log.jsonl`, `checkpoints/step-XXXXXXXX/` and, when training has ended, `model/`. The process that works on a run holds
a lock on `.lock` in it until it ends.
"""

import json
import os
import sys
from pathlib import Path
from typing import IO, Any

from simforcing.errors import SimForcingError
from simforcing.files import write_text

LOCK = ".lock"
FREE = ("log_every", "checkpoint_seconds", "validate_seconds", "rollout_every", "keep", "max_skipped")
"""Settings of training that may change when a run goes on: they change nothing that is computed."""
_held: dict[Path, IO[str]] = {}  # the locks of this process, by run directory


def claim_run(out: Path, description: dict[str, Any]) -> None:
    """Makes `out` the directory of the run that `description` defines, or recognises it as such.

    It then belongs to this process until that ends.

    Raises:
        SimForcingError: `out` belongs to another run (says which settings differ), another process works on it, or
            it cannot be written.
    """
    file = out / "run.json"
    wanted = json.loads(json.dumps(description))
    try:
        out.mkdir(parents=True, exist_ok=True)
        others = [p for p in out.iterdir() if p.name != LOCK and not p.name.startswith("run.json.partial-")]
        if others and not file.exists():
            raise SimForcingError(f"{out} is not empty and not a training run; choose another --out")
        _lock(out)
        if not file.exists():
            for leftover in out.glob("run.json.partial-*"):
                leftover.unlink()
            write_text(file, json.dumps(wanted, indent=2) + "\n")
        found = json.loads(file.read_text())
    except OSError as error:
        raise SimForcingError(f"cannot write to {out}: {error.strerror}") from error
    except ValueError as error:
        raise SimForcingError(f"{file} is damaged: {error}; choose another --out") from error
    differs = differing(found, wanted, "now")
    if differs:
        raise SimForcingError(
            f"{out} holds a run of another configuration ({'; '.join(differs[:4])}); choose another --out"
        )


def differing(there: Any, here: Any, word: str) -> list[str]:
    """What differs between two descriptions of runs, besides `FREE`: `key: value there, value <word>`."""
    found = _differences(there, here)
    return [f"{k}: {v} there, {w} {word}" for k, v, w in found if k.rpartition(".")[2] not in FREE]


def _differences(a: Any, b: Any, at: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for k in sorted({*a, *b}) for d in _differences(a.get(k), b.get(k), f"{at}.{k}" if at else k)]
    return [] if a == b else [(at, a, b)]


def _lock(out: Path) -> None:
    """Keeps other processes off a run until this one ends, however it ends; asking again changes nothing."""
    if sys.platform == "win32":
        return
    import fcntl

    file, key = out / LOCK, out.resolve()
    held = _held.get(key)
    if held is not None and file.exists() and os.path.samestat(os.fstat(held.fileno()), file.stat()):
        return
    handle = file.open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise SimForcingError(f"{out} is in use by another process; wait for it or choose another --out") from None
    except OSError:
        pass  # a file system without locks
    _held[key] = handle


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Adds a line to a log of JSON lines.

    Raises:
        SimForcingError: it cannot be written.
    """
    try:
        with path.open("a") as log:
            log.write(json.dumps(row) + "\n")
    except OSError as error:
        raise SimForcingError(f"cannot write {path}: {error.strerror}; earlier checkpoints are intact") from error


def cut_log(path: Path, step: int) -> None:
    """Takes out of a log of JSON lines what was written after `step`, and a line that is torn.

    A run that resumes at `step` writes those rows again. Without a log, or with nothing to take out, nothing happens.

    Raises:
        SimForcingError: it cannot be read or written.
    """
    try:
        before = path.read_text(errors="replace") if path.exists() else ""
        after = "".join(f"{line}\n" for line in before.splitlines() if _row_step(line) <= step)
        if after != before:
            write_text(path, after)
    except OSError as error:
        raise SimForcingError(f"cannot write {path}: {error.strerror}; checkpoints are intact") from error


def _row_step(line: str) -> float:
    """The step of a log row; infinite for what is no row."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return float("inf")
