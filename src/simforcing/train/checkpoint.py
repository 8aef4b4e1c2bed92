"""Checkpoints of a training run: written aside, renamed when complete, the last few kept.

A run directory holds `run.json` (what defines the run), `log.jsonl`, `checkpoints/step-XXXXXXXX/` and, when training
has ended, `model/`. A checkpoint is a model directory with `trainer.pt` (optimiser, step, seconds) beside the weights.
"""

import json
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from simforcing.errors import SimForcingError
from simforcing.model.world_model import WorldModel, load_strictly, load_world_model

KEEP = 2
_REMEDY = "remove it to resume from the one before"


@dataclass
class Progress:
    """How far a run has come: optimiser steps, and seconds spent in them."""

    step: int = 0
    seconds: float = 0.0


def claim_run(out: Path, description: dict[str, Any]) -> None:
    """Makes `out` the directory of the run that `description` defines, or recognises it as such.

    Raises:
        SimForcingError: `out` belongs to another run (says which settings differ) or cannot be written.
    """
    file = out / "run.json"
    wanted = json.loads(json.dumps(description))
    if file.exists():
        try:
            found = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise SimForcingError(f"{file} is damaged: {error}; choose another --out") from error
        differs = [f"{k}: {v} there, {w} now" for k, v, w in _differences(found, wanted)]
        if differs:
            raise SimForcingError(
                f"{out} holds a run of another configuration ({'; '.join(differs[:4])}); choose another --out"
            )
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        for leftover in out.glob("run.json.partial-*"):
            leftover.unlink()
        if any(out.iterdir()):
            raise SimForcingError(f"{out} is not empty and not a training run; choose another --out")
        write_text(file, json.dumps(wanted, indent=2) + "\n")
    except OSError as error:
        raise SimForcingError(f"cannot write to {out}: {error.strerror}") from error


def _differences(a: Any, b: Any, at: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for k in sorted({*a, *b}) for d in _differences(a.get(k), b.get(k), f"{at}.{k}" if at else k)]
    return [] if a == b else [(at, a, b)]


def write_text(path: Path, text: str) -> None:
    """Writes aside and renames, so that the file is whole at any moment."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.write_text(text)
    os.replace(partial, path)


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


def save_checkpoint(out: Path, model: WorldModel, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
    """Writes a checkpoint and removes all but the last `KEEP`.

    Raises:
        SimForcingError: it cannot be written (disk full, read-only); earlier checkpoints are untouched.
    """
    root = out / "checkpoints"
    target = root / f"step-{progress.step:08d}"
    partial = root / f"{target.name}.partial-{os.getpid()}"
    if target.exists():
        return target
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
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise SimForcingError(f"{newest} is damaged: trainer.pt: {reason}; {_REMEDY}") from error
    return Progress(step=state["step"], seconds=state["seconds"])
