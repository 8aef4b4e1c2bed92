"""Checkpoints of a run that are whole or not there.

A checkpoint is what `torch.distributed.checkpoint` writes (trained weights, both moments, average of the weights; any
number of processes may load it), with `trainer.json` (progress, which the learning rate and the place in the order of
clips follow from, and the whole `run.json`: configuration, data, split), `random-<rank>.json` (generators of each
process) and, last, `files.json` (size and CRC of every file).
"""

import json
import os
import pickle
import random
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from simforcing.errors import SimForcingError
from simforcing.files import partial_path
from simforcing.files import write_text as write_text  # also imported from here
from simforcing.train.config import KEEP as KEEP
from simforcing.train.config import Progress as Progress
from simforcing.train.directory import append_row as append_row
from simforcing.train.directory import claim_run as claim_run
from simforcing.train.directory import cut_log as cut_log
from simforcing.train.directory import differing
from simforcing.train.parallel import Team

_REMEDY = "remove it to resume from the one before"
# What reading a checkpoint raises where a file is cut, overwritten, or holds something else.
_DAMAGE = (OSError, RuntimeError, EOFError, pickle.UnpicklingError, LookupError, ValueError, TypeError, AttributeError)


@dataclass
class State:
    """What a checkpoint holds besides the progress: of a model, only what is trained; the rest is what it began as."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Mapping[str, Tensor] | None = None
    progress: Progress = field(default_factory=Progress)

    def tensors(self) -> dict[str, Tensor]:
        """By name; loading writes into them. All parameters have taken the same number of steps."""
        found: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                state = self.optimizer.state[p]
                found[f"model.{name}"] = p.detach()
                found |= {f"optimizer.{name}.{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}
                found.setdefault("optimizer.step", state["step"])
        return found | {f"average.{name}": value for name, value in (self.average or {}).items()}

    def load(self, checkpoint: Path, team: "Team") -> None:
        """Reads what `tensors` names."""
        tensors = self.tensors()
        with _one_process_is_meant():
            load(tensors, storage_reader=_Reader(checkpoint), no_dist=team.alone)
        for state in self.optimizer.state.values():
            state["step"].copy_(tensors["optimizer.step"])


# -- checkpoints ----------------------------------------------------------------------------------------------------


def checkpoints(out: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in (out / "checkpoints").glob("step-*") if "partial" not in p.name)


def save_checkpoint(out: Path, state: State, team: Team = Team(), keep: int = KEEP) -> Path:
    """Writes a checkpoint, reads it back, renames it, and removes all but the last `keep` and the best.

    Raises:
        SimForcingError: it cannot be written (disk full, read-only); earlier checkpoints are untouched.
    """
    target = out / "checkpoints" / f"step-{state.progress.step:08d}"
    if team.on_main(target.exists):
        return target
    partial = team.on_main(lambda: _begun(target))
    try:
        with _told(f"cannot write checkpoint {target}", "earlier checkpoints are intact", team):
            _write(partial, state, team)
        with _told(f"cannot write checkpoint {target}", "earlier checkpoints are intact", team):
            if team.main:
                _finish(out, partial, target, state, team)
    finally:
        if team.main:
            shutil.rmtree(partial, ignore_errors=True)
    if team.main:
        kept = [*checkpoints(out)[-keep:], out / "checkpoints" / f"step-{state.progress.best_step or 0:08d}"]
        for old in checkpoints(out):
            if old not in kept:
                shutil.rmtree(old, ignore_errors=True)
    return target


def _begun(target: Path) -> Path:
    partial = partial_path(target)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise SimForcingError(
            f"cannot write checkpoint {target}: {error.strerror}; earlier checkpoints are intact"
        ) from error
    return partial


def _write(partial: Path, state: State, team: Team) -> None:
    with _one_process_is_meant():
        save(state.tensors(), storage_writer=FileSystemWriter(partial), no_dist=team.alone)
    (partial / f"random-{team.rank}.json").write_text(json.dumps(random_state()))


def _finish(out: Path, partial: Path, target: Path, state: State, team: Team) -> None:
    description = json.loads((out / "run.json").read_text()) if (out / "run.json").exists() else {}
    rates = [group["lr"] for group in state.optimizer.param_groups]
    about = {"progress": asdict(state.progress), "rates": rates, "processes": team.size, "run": description}
    (partial / "trainer.json").write_text(json.dumps(about, indent=2) + "\n")
    _check_names(partial, state)
    sums = {p.name: _sum(p) for p in sorted(partial.iterdir())}
    (partial / "files.json").write_text(json.dumps(sums, indent=2) + "\n")
    for path in (*partial.iterdir(), partial):
        _to_disk(path)
    partial.rename(target)
    _to_disk(target.parent)


def _to_disk(path: Path) -> None:
    """Waits until a file or the names in a directory would survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sum(path: Path) -> dict[str, int]:
    crc = 0
    with path.open("rb") as stream:
        while piece := stream.read(1 << 22):
            crc = zlib.crc32(piece, crc)
    return {"size": path.stat().st_size, "crc32": crc}


def resume(out: Path, state: State, team: Team = Team()) -> Progress:
    """Loads the newest checkpoint, by however many processes it was written; a new run starts at zero.

    Raises:
        SimForcingError: the checkpoint is damaged, or does not fit the run or the model.
    """

    def newest() -> Path | None:
        for leftover in (out / "checkpoints").glob("*.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        return next(reversed(checkpoints(out)), None)

    found = team.on_main(newest)
    if found is None:
        return state.progress
    team.on_main(lambda: _check_run(out, found))
    load_checkpoint(found, state, team)
    with _told(f"{found} is damaged", _REMEDY, team):
        state.progress = Progress(**json.loads((found / "trainer.json").read_text())["progress"])
        own = found / f"random-{team.rank}.json"
        if own.exists():
            restore_random(json.loads(own.read_text()))
    return state.progress


def load_checkpoint(checkpoint: Path, state: State, team: Team = Team()) -> None:
    """The tensors of a checkpoint, into those of the state.

    Raises:
        SimForcingError: it is damaged, or of another model.
    """
    with _told(f"{checkpoint} is damaged", _REMEDY, team):
        sums = json.loads((checkpoint / "files.json").read_text())
        for name in sorted(sums)[team.rank :: team.size]:
            if _sum(checkpoint / name) != sums[name]:
                raise ValueError(f"{name} is not as it was written")
        _check_names(checkpoint, state)
    with _told(f"{checkpoint} is damaged", _REMEDY, team):
        state.load(checkpoint, team)


def load_weights(checkpoint: Path, model: nn.Module, averaged: bool = False, team: Team = Team()) -> None:
    """Only the trained weights of a checkpoint, or their average.

    Raises:
        SimForcingError: it is damaged, or of another model.
    """
    part = "average" if averaged else "model"
    tensors: dict[str, Any] = {f"{part}.{n}": p.detach() for n, p in model.named_parameters() if p.requires_grad}
    with _told(f"{checkpoint} is damaged", _REMEDY, team), _one_process_is_meant():
        load(tensors, storage_reader=_Reader(checkpoint), no_dist=team.alone)


def _check_run(out: Path, checkpoint: Path) -> None:
    """Refuses a checkpoint of another run, such as one that was copied here."""
    try:
        theirs = json.loads((checkpoint / "trainer.json").read_text())["run"]
        ours = json.loads((out / "run.json").read_text()) if (out / "run.json").exists() else {}
    except _DAMAGE as error:
        raise SimForcingError(f"{checkpoint} is damaged: trainer.json: {_line(error)}; {_REMEDY}") from error
    differs = differing(theirs, ours, "here")
    if differs:
        raise SimForcingError(f"{checkpoint} belongs to another run ({'; '.join(differs[:4])}); remove it")


def _check_names(checkpoint: Path, state: State) -> None:
    """Raises SimForcingError where a checkpoint holds other tensors than the state."""
    stored = _Reader(checkpoint).read_metadata().state_dict_metadata
    theirs = {k: tuple(v.size) for k, v in stored.items() if isinstance(v, TensorStorageMetadata)}
    ours = {k: tuple(v.shape) for k, v in state.tensors().items()}
    problems = [
        f"{what}: {', '.join(names[:3])}{'...' if len(names) > 3 else ''}"
        for what, names in (
            ("missing", sorted(ours.keys() - theirs.keys())),
            ("unexpected", sorted(theirs.keys() - ours.keys())),
            ("wrong shape", sorted(k for k in ours.keys() & theirs.keys() if ours[k] != theirs[k])),
        )
        if names
    ]
    if problems:
        raise SimForcingError(f"{checkpoint} does not fit the model; {'; '.join(problems)}")


@contextmanager
def _told(what: str, remedy: str, team: Team) -> Iterator[None]:
    """What goes wrong inside, in any process, becomes one line in all of them."""
    mine: str | None = None
    try:
        yield
    except SimForcingError as error:
        mine = str(error)
    except CheckpointException as error:
        mine = "; ".join({_line(e) for e, _ in error.failures.values()})
    except _DAMAGE as error:
        mine = _line(error)
    failures = [f for f in team.gathered(mine) if f is not None]
    if failures:
        raise SimForcingError(failures[0] if "does not fit" in failures[0] else f"{what}: {failures[0]}; {remedy}")


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Without the warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _line(error: BaseException) -> str:
    first: str = str(error).partition("\n")[0]
    return first or type(error).__name__


class _Unpickler(pickle.Unpickler):
    """Reads the index of a distributed checkpoint, and nothing else that a pickle could hold."""

    PLAIN = (
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
    )

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for anything else."""
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in self.PLAIN or module.startswith("torch.distributed.checkpoint."):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata holds {module}.{name}")


class _Reader(FileSystemReader):
    """As its base, without trusting the index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, read by the restricted unpickler."""
        with (Path(self.path) / ".metadata").open("rb") as stream:
            found: Metadata = _Unpickler(stream).load()
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


# -- generators -----------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's generators in this process, as plain values."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - whoever uses it, it is restored
    cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else None
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": cuda,
    }


def restore_random(state: dict[str, Any]) -> None:
    """Inverse of `random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
