"""Files of tensors: read without running what is in them, and compared name by name with what a network takes.

Every layout of others' checkpoints is described by one function, from our parameter names to theirs; `Weights` puts
it together with the tensors. Errors list tensors under the names that the file has.
"""

import json
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from simforcing.errors import SimForcingError

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LISTED = 40
"""So many names of one kind are listed in an error; of more, the rest is counted."""


@dataclass(frozen=True)
class Weights:
    """Tensors as a file names them, and how the file names a parameter of ours."""

    tensors: Mapping[str, Tensor]
    name: Callable[[str], str]
    where: str

    def shape(self, ours: str, ndim: int) -> tuple[int, ...]:
        """Shape of one tensor, for sizes. Raises SimForcingError if it is missing or not of `ndim` dimensions."""
        theirs = self.name(ours)
        if theirs not in self.tensors:
            raise SimForcingError(f"{self.where} does not fit; missing: {theirs}")
        shape = tuple(self.tensors[theirs].shape)
        if len(shape) != ndim or 0 in shape:
            raise SimForcingError(f"{self.where} does not fit; wrong shape: {theirs} {shape} is not {ndim}-dimensional")
        return shape

    def count(self, prefix: str) -> int:
        """How many numbers follow a prefix of the file's names (`blocks.` has as many as there are blocks)."""
        pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
        return len({found[1] for key in self.tensors if (found := pattern.match(key))})

    def fitted(self, want: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """All tensors that are wanted and no others, under our names; dtypes stay.

        Raises:
            SimForcingError: lists missing, unexpected and wrongly shaped tensors, and those that are not floating.
        """
        theirs = {self.name(ours): (ours, shape) for ours, shape in want.items()}
        both = theirs.keys() & self.tensors.keys()
        shapes = [
            f"{key} {tuple(self.tensors[key].shape)} instead of {tuple(theirs[key][1])}"
            for key in both
            if self.tensors[key].shape != theirs[key][1]
        ]
        dtypes = [f"{key} {self.tensors[key].dtype}" for key in both if self.tensors[key].dtype not in FLOATING]
        problems = {
            "missing": theirs.keys() - both,
            "unexpected": self.tensors.keys() - both,
            "wrong shape": shapes,
            "not floating": dtypes,
        }
        if said := "; ".join(f"{what}: {_listed(sorted(names))}" for what, names in problems.items() if names):
            raise SimForcingError(f"{self.where} does not fit; {said}")
        return {ours: self.tensors[key] for key, (ours, _) in theirs.items()}


def check_finite(state: Mapping[str, Tensor], where: str) -> None:
    """Refuses weights that hold NaN or infinity, and lists the tensors."""
    if bad := [key for key, value in state.items() if not bool(torch.isfinite(value).all())]:
        raise SimForcingError(f"{where} holds NaN or infinite weights: {_listed(sorted(bad))}; get the file again")


def shapes(module: torch.nn.Module, prefix: str = "") -> dict[str, torch.Size]:
    """Names and shapes of a module's state."""
    return {prefix + key: value.shape for key, value in module.state_dict().items()}


def is_torch_file(path: Path) -> bool:
    """Whether a file begins like one of `torch.save` (a zip archive, or a bare pickle as of old)."""
    with path.open("rb") as file:
        start = file.read(4)
    return start == b"PK\x03\x04" or start[:1] == b"\x80"


def check_archive(path: Path) -> None:
    """Compares all checksums of a file of `torch.save`; reads it whole. A bare pickle, as of old, has none.

    Raises:
        SimForcingError: the file is missing or damaged.
    """
    if not path.is_file():
        raise SimForcingError(f"{path}: no such file")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as parts:
                bad = parts.testzip()
            if bad is not None:
                raise SimForcingError(f"{path} is damaged: the checksum of {bad} is wrong; get the file again")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        raise SimForcingError(f"{path} is damaged: {_first_line(error)}; get the file again") from error


def read_pickle(path: Path) -> Any:
    """What `torch.save` wrote, tensors mapped from the file where possible; nothing in it is run.

    Raises:
        SimForcingError: the file is missing, damaged, or holds more than tensors and plain values.
    """
    if not path.is_file():
        raise SimForcingError(f"{path}: no such file")
    archive = is_torch_file(path) and zipfile.is_zipfile(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise SimForcingError(
                f"{path} holds code or objects ({found[1]}), which are not loaded: only tensors and plain values are"
            ) from error
        raise SimForcingError(f"{path} is not a file of torch.save, or is damaged: {_first_line(error)}") from error
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise SimForcingError(f"{path} is not a file of torch.save, or is damaged: {_first_line(error)}") from error


def read_state(path: Path) -> dict[str, Tensor]:
    """A file of `torch.save` that holds named tensors and nothing else."""
    content = read_pickle(path)
    if not is_state(content):
        raise SimForcingError(f"{path} does not hold named tensors, but {describe(content)}")
    return dict(content)


def torch_file(directory: Path, wanted: Callable[[set[str]], bool]) -> Path | None:
    """The one file of `torch.save` (.pth, .pt) in a directory whose tensors' names are `wanted`; None if there is none.

    Raises:
        SimForcingError: there are several, or one of the files is damaged.
    """
    files = [file for file in sorted(directory.glob("*.pt*")) if file.suffix in (".pt", ".pth") and is_torch_file(file)]
    found = [file for file in files if is_state(content := read_pickle(file)) and wanted(set(content))]
    if len(found) > 1:
        raise SimForcingError(f"{directory}: {', '.join(file.name for file in found)} hold the same part; keep one")
    return found[0] if found else None


def is_state(content: Any) -> bool:
    """Whether a value is a mapping from names to tensors, with at least one."""
    return (
        isinstance(content, Mapping)
        and len(content) > 0
        and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items())
    )


def describe(content: Any) -> str:
    """A few words on what a file holds, for errors."""
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}"
    return f"a mapping with {_listed([str(key) for key in content], 6) or 'nothing'}"


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """One safetensors file. Raises SimForcingError if it is missing or damaged."""
    if not path.is_file():
        raise SimForcingError(f"{path}: no such file")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise SimForcingError(f"{path} is not a safetensors file, or is damaged: {_first_line(error)}") from error


def shards(directory: Path, stem: str) -> list[Path]:
    """The files of a checkpoint: those in `<stem>.safetensors.index.json`, `<stem>.safetensors`, or its numbered parts.

    Raises:
        SimForcingError: there are none, or one is missing.
    """
    index = directory / f"{stem}.safetensors.index.json"
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not listed or not all(isinstance(v, str) for v in listed.values()):
            raise SimForcingError(f"{index} has no weight_map from tensors to files; get the file again")
        files = [directory / Path(name).name for name in sorted(set(listed.values()))]
    elif (directory / f"{stem}.safetensors").is_file():
        files = [directory / f"{stem}.safetensors"]
    else:
        files = sorted(directory.glob(f"{stem}-*-of-*.safetensors"))
    if missing := [file.name for file in files if not file.is_file()]:
        raise SimForcingError(f"{directory}: missing: {', '.join(missing)}; get these files too")
    if not files:
        raise SimForcingError(f"{directory} holds no {stem}*.safetensors")
    return files


def read_shards(directory: Path, stem: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint in one or several files (see `shards`). A name in two files is an error."""
    state: dict[str, Tensor] = {}
    for file in shards(directory, stem):
        part = read_safetensors(file)
        if twice := state.keys() & part.keys():
            raise SimForcingError(f"{file} repeats tensors of another file: {_listed(sorted(twice))}")
        state |= part
    return state


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file with an object. Raises SimForcingError for anything else."""
    if not path.is_file():
        raise SimForcingError(f"{path}: no such file")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise SimForcingError(f"{path} is not JSON: {_first_line(error)}") from error
    if not isinstance(found, dict):
        raise SimForcingError(f"{path} is not a JSON object, but a {type(found).__name__}")
    return found


def number(config: Mapping[str, Any], key: str, where: Path | str) -> int:
    """A positive whole number of a configuration. Raises SimForcingError naming the file and the key."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SimForcingError(f"{where}: {key} is {value!r}; a positive whole number is needed")
    return value


def _listed(names: list[str], limit: int = LISTED) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
