"""Checkpoints of a training run: written aside, renamed when complete, the last few kept.

A run directory holds `run.json` (what defines the run), `log.jsonl`, `checkpoints/step-XXXXXXXX/` and, when training
has ended, `model/`. A checkpoint is a model directory with `trainer.pt` (optimiser, step, seconds) beside the weights.
The process that works on a run holds a lock on `.lock` in it until it ends.
"""

import json
import os
import pickle
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError

from simforcing.errors import SimForcingError
from simforcing.files import partial_path
from simforcing.files import write_text as write_text  # also imported from here
from simforcing.model.world_model import WorldModel, load_strictly, load_world_model

KEEP = 2
LOCK = ".lock"
_REMEDY = "remove it to resume from the one before"
# What reading an optimiser's state raises where the file is cut, overwritten, or holds something else.
_DAMAGE = (
    OSError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
)
_held: dict[Path, IO[str]] = {}  # the locks of this process, by run directory


@dataclass
class Progress:
    """How far a run has come: optimiser steps, and seconds spent in them."""

    step: int = 0
    seconds: float = 0.0


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
    differs = [f"{k}: {v} there, {w} now" for k, v, w in _differences(found, wanted)]
    if differs:
        raise SimForcingError(
            f"{out} holds a run of another configuration ({'; '.join(differs[:4])}); choose another --out"
        )


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


def save_checkpoint(out: Path, model: WorldModel, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
    """Writes a checkpoint and removes all but the last `KEEP`.

    Raises:
        SimForcingError: it cannot be written (disk full, read-only); earlier checkpoints are untouched.
    """
    root = out / "checkpoints"
    target = root / f"step-{progress.step:08d}"
    if target.exists():
        return target
    partial = partial_path(target)
    try:
        root.mkdir(exist_ok=True)
        model.save_pretrained(partial)
        torch.save(
            {"optimizer": optimizer.state_dict(), "step": progress.step, "seconds": progress.seconds},
            partial / "trainer.pt",
        )
        partial.rename(target)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise SimForcingError(f"cannot write checkpoint {target}: {error}; earlier checkpoints are intact") from error
    for old in checkpoints(out)[:-KEEP]:
        shutil.rmtree(old)
    return target


def checkpoints(out: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in (out / "checkpoints").glob("step-*") if "partial" not in p.name)


def resume(out: Path, model: WorldModel, optimizer: torch.optim.Optimizer) -> Progress:
    """Loads the newest checkpoint into model and optimiser; a new run starts at zero.

    Raises:
        SimForcingError: the checkpoint is damaged or does not fit.
    """
    for leftover in (out / "checkpoints").glob("*.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    found = checkpoints(out)
    if not found:
        return Progress()
    newest = found[-1]
    try:
        weights = load_world_model(newest).state_dict()
    except SimForcingError as error:
        raise SimForcingError(f"{error}; {_REMEDY}") from error
    load_strictly(model, weights, str(newest))
    try:
        state = torch.load(newest / "trainer.pt", map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        return Progress(step=int(state["step"]), seconds=float(state["seconds"]))
    except _DAMAGE as error:
        reason = str(error).partition("\n")[0]
        raise SimForcingError(f"{newest} is damaged: trainer.pt: {reason}; {_REMEDY}") from error
