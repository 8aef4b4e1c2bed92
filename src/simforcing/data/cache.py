"""Encoded latents and text on disk: safetensors shards under a header that says exactly what they were made from.

A cache is a directory with `index.json` and shards. While it is being made it lies in `<out>.parts/`: `plan.json` says
what it will be, each shard appears when it is complete, and `index.json`, written last, makes it a cache, which is then
renamed to `<out>`. A run that was killed goes on with the shards that are missing or damaged, and several runs may fill
one folder. Every shard carries the header and a checksum of every row, so that what is read is what was written,
also where a cache is larger than the memory and only the rows asked for are ever read.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from simforcing.errors import SimForcingError
from simforcing.files import partial_path, write_text

INDEX = "index.json"
PLAN = "plan.json"
OPEN_SHARDS = 1024
"""Shards that are kept open; far below what systems allow."""

_EDGE = 1 << 16
_META = "cache"  # one key: several would be stored in no fixed order, and equal shards have equal bytes
_REMEDY = "run 'simforcing encode' again, which makes this shard anew, or delete the cache"


def differences(stored: Any, now: Any, at: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, stored value, value now) of everything in which two headers differ."""
    if isinstance(stored, dict) and isinstance(now, dict):
        keys = sorted({*stored, *now})
        none = "nothing"
        return [
            d for k in keys for d in differences(stored.get(k, none), now.get(k, none), f"{at}.{k}" if at else str(k))
        ]
    return [] if stored == now else [(at, stored, now)]


def check_header(where: Path, header: Mapping[str, Any], expect: Mapping[str, Any]) -> None:
    """Compares a cache's header with what is expected; keys that are not expected are not looked at.

    Raises SimForcingError that names each key that differs with both values.
    """
    wanted = json.loads(json.dumps(dict(expect)))
    found = differences({k: header.get(k, "nothing") for k in wanted}, wanted)
    if found:
        made, now = (", ".join(f"{d[0]} = {d[i]}" for d in found[:4]) for i in (1, 2))
        raise SimForcingError(f"{where}: cache was made with {made}, now {now}; encode to another directory")


# -- writing --------------------------------------------------------------------------------------------------------


def write_cache(directory: Path, header: Mapping[str, Any], shards: Iterable[Mapping[str, np.ndarray]]) -> Path:
    """Write shards of named arrays as they come (one in memory at a time); the directory appears when all are done.

    header: JSON-able; by convention it names codec, normalisation, clip rule, resolution and source hash. An array name
    may occur in several shards: reading joins them along the first axis. Raises SimForcingError if the directory
    exists, the header is not JSON-able or there is no shard.
    """
    if directory.exists():
        raise SimForcingError(f"{directory}: already exists and is not overwritten; choose another name or delete it")
    partial = partial_path(directory)
    partial.mkdir(parents=True)
    try:
        plain, names = _plain(directory, header), []
        for number, shard in enumerate(shards):
            names.append(f"shard-{number:05d}.safetensors")
            _save_shard(partial / names[-1], shard, plain, {})
        if not names:
            raise SimForcingError(f"{directory}: no shards to cache; the selection is empty")
        _write_index(partial, plain, {}, names)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return directory


@dataclass
class CacheWriter:
    """A cache that is made shard by shard, by one run or several, and goes on where it stopped.

    out: where it will be. header: what makes its arrays what they are. names: its shards. The folder in which it lies
    (`root`) is `<out>.parts`, or `out` itself where that is complete and only damaged shards are made again.
    """

    out: Path
    header: Mapping[str, Any]
    names: Sequence[str]
    root: Path = field(init=False)

    def __post_init__(self) -> None:
        """Raises SimForcingError where something else lies there (names keys and both values)."""
        self.header = _plain(self.out, self.header)
        plan = {"header": self.header, "shards": list(self.names)}
        if self.out.exists():
            check_header(self.out, read_header(self.out), self.header)
            if [entry["file"] for entry in _read_index(self.out)["shards"]] != plan["shards"]:
                raise SimForcingError(f"{self.out}: is cut into other shards; encode to another directory")
            self.root = self.out
            return
        self.root = self.out.with_name(f"{self.out.name}.parts")
        file = self.root / PLAN
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                write_text(file, json.dumps(plan) + "\n")
            stored = json.loads(file.read_text())
        except OSError as error:
            raise SimForcingError(f"{self.root}: cannot be written ({error.strerror})") from error
        except ValueError as error:
            raise SimForcingError(f"{file}: damaged ({error}); delete {self.root} and encode again") from error
        check_header(self.root, stored["header"], self.header)
        if stored != plan:
            raise SimForcingError(f"{self.root}: was begun by another version; delete it and encode again")

    def sound(self, name: str) -> bool:
        """Whether a shard is there and every row of it is as it was written."""
        try:
            shard = _Shard(self.root / name, self.header)
            for key, view in shard.arrays.items():
                shard.take(key, range(view.shape[0]))
        except SimForcingError:
            return False
        return True

    def save(self, name: str, arrays: Mapping[str, np.ndarray], notes: Mapping[str, Any]) -> None:
        """Write one shard, aside and renamed, with notes (JSON-able) of how it was made. No arrays: it is empty.

        Raises SimForcingError where it cannot be written; other shards are untouched.
        """
        path = self.root / name
        partial = partial_path(path)
        try:
            _save_shard(partial, arrays, self.header, notes)
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            reason = f"{error}; shards that are finished are intact"
            if not self.root.exists():
                reason = "another run has put the cache together; run the same command again"
            raise SimForcingError(f"{path}: cannot be written: {reason}") from error

    def notes(self) -> list[dict[str, Any]]:
        """What was noted with each shard, in order. Raises SimForcingError for one that is missing or damaged."""
        return [_Shard(self.root / name, self.header).notes for name in self.names]

    def finish(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        """Make it a cache whose header is completed by `contents` (JSON-able); returns that header."""
        _write_index(self.root, self.header, contents, self.names)
        if self.root != self.out:
            (self.root / PLAN).unlink()
            for leftover in self.root.glob("*.partial-*"):
                leftover.unlink()
            self.root.rename(self.out)
        return read_header(self.out)


def _plain(where: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """A header as JSON stores it."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(header), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise SimForcingError(f"{where}: cache header cannot be stored as JSON ({error}); use plain values") from error
    return plain


def _save_shard(
    path: Path, shard: Mapping[str, np.ndarray], header: Mapping[str, Any], notes: Mapping[str, Any]
) -> None:
    arrays = {key: np.ascontiguousarray(array) for key, array in sorted(shard.items())}
    sums = {key: [zlib.crc32(row.data) for row in array] for key, array in arrays.items()}
    about = json.dumps({"header": header, "crc32": sums, "notes": notes}, sort_keys=True)
    path.write_bytes(save(arrays, metadata={_META: about}))  # save_file would hide it from other users


def _write_index(root: Path, header: Mapping[str, Any], contents: Mapping[str, Any], names: Sequence[str]) -> None:
    entries = []
    for name in names:
        arrays = _Shard(root / name, header).stated()
        entries.append({"file": name, "bytes": (root / name).stat().st_size, "arrays": arrays})
    index = {"header": header, "contents": contents, "shards": entries}
    write_text(root / INDEX, json.dumps(index, indent=1) + "\n")


# -- reading --------------------------------------------------------------------------------------------------------


def read_header(directory: Path) -> dict[str, Any]:
    """The header of a cache. Raises SimForcingError if it is not a (complete) cache."""
    index = _read_index(directory)
    return {**index["header"], **index["contents"]}


def read_cache(directory: Path, expect: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """All arrays of a cache in memory, those in several shards joined along the first axis.

    Raises SimForcingError as `open_cache` does, and for rows that are not as they were written.
    """
    return dict(open_cache(directory, expect))


def open_cache(directory: Path, expect: Mapping[str, Any]) -> "Cache":
    """A cache whose arrays are read when asked for.

    Every key of `expect` must be in the header with an equal value (keys of the header that are not expected are not
    looked at). Raises SimForcingError naming the key and both values if not, and if a shard is missing or cut short.
    """
    index = _read_index(directory)
    check_header(directory, {**index["header"], **index["contents"]}, expect)
    for entry in index["shards"]:
        path = directory / entry["file"]
        size = path.stat().st_size if path.exists() else None
        if size != entry["bytes"]:
            found = "is missing" if size is None else f"is damaged, {size} bytes instead of {entry['bytes']}"
            raise SimForcingError(f"{path}: shard {found}; {_REMEDY}")
    return Cache(directory, index)


class Cache(Mapping[str, np.ndarray]):
    """Arrays of a cache by name; `cache[name]` reads one whole, `cache.rows(name)` only the rows asked for."""

    def __init__(self, directory: Path, index: Mapping[str, Any]) -> None:
        self.directory = directory
        self.header: dict[str, Any] = {**index["header"], **index["contents"]}
        self._places: dict[str, list[tuple[str, tuple[int, ...], str]]] = {}
        self._stated = {entry["file"]: entry["arrays"] for entry in index["shards"]}
        for file, arrays in self._stated.items():
            for name, about in arrays.items():
                place = (file, tuple(about["shape"]), about["dtype"])
                self._places.setdefault(name, []).append(place)
        self._own = index["header"]
        self._shard = lru_cache(OPEN_SHARDS)(self._open)

    def _open(self, file: str) -> "_Shard":
        shard = _Shard(self.directory / file, self._own)
        if shard.stated() != self._stated[file]:
            raise SimForcingError(f"{shard.path}: shard does not hold what {INDEX} says; {_REMEDY}")
        return shard

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> np.ndarray:
        rows = self.rows(name)
        return rows.take(np.arange(len(rows)))

    def rows(self, name: str) -> "Rows":
        """One array, joined over its shards, none of it in memory. Raises KeyError for a name that is not there."""
        return Rows(self, name, self._places[name])

    def read(self, file: str, name: str, rows: Iterable[int]) -> np.ndarray:
        """Rows of an array of one shard. Raises SimForcingError where they are not as they were written."""
        return self._shard(file).take(name, rows)


class Rows:
    """One array of a cache, read by rows; a `Cache` makes it."""

    def __init__(self, cache: Cache, name: str, places: Sequence[tuple[str, tuple[int, ...], str]]) -> None:
        self._cache, self.name = cache, name
        self._files = [file for file, _, _ in places]
        self._ends = np.cumsum([shape[0] for _, shape, _ in places])
        first = places[0]
        self.dtype = np.dtype(first[2])
        self.shape = (int(self._ends[-1]), *first[1][1:])
        if any(shape[1:] != first[1][1:] or dtype != first[2] for _, shape, dtype in places):
            raise SimForcingError(f"{cache.directory}: shards hold {name} of different shapes; encode again")

    def __len__(self) -> int:
        return self.shape[0]

    def take(self, rows: np.ndarray) -> np.ndarray:
        """These rows, in this order, as an array of its own.

        Raises SimForcingError, naming the shard, where they are not as they were written; IndexError outside 0..n-1.
        """
        wanted = np.asarray(rows, np.int64)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"{self.name}: rows {wanted.min()} to {wanted.max()} asked for, there are {len(self)}")
        out = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        order = np.argsort(wanted, kind="stable")
        shards = np.searchsorted(self._ends, wanted[order], side="right")
        cuts = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(order)] if len(order) else [0]
        for first, last in pairwise(cuts):  # one stretch a shard
            places, shard = order[first:last], int(shards[first])
            begin = int(self._ends[shard - 1]) if shard else 0
            out[places] = self._cache.read(self._files[shard], self.name, (wanted[places] - begin).tolist())
        return out


class _Shard:
    """One file, mapped into memory; rows are copied out of it and checked."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        try:
            file: Any = safe_open(path, "np")
            about = json.loads((file.metadata() or {})[_META])
            self.arrays = {name: _view(file, name) for name in file.keys()}
            own: dict[str, Any] = about["header"]
            self.notes: dict[str, Any] = about["notes"]
            self._sums: dict[str, list[int]] = about["crc32"]
            counted = {name: len(sums) for name, sums in self._sums.items()}
            if counted != {name: view.shape[0] for name, view in self.arrays.items()}:
                raise SimForcingError(f"{path}: shard is damaged (its checksums are of other arrays); {_REMEDY}")
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SimForcingError(f"{path}: shard is missing or damaged ({error}); {_REMEDY}") from error
        if own != header:
            found = differences(own, dict(header))[0]
            raise SimForcingError(
                f"{path}: shard of another cache ({found[0]} = {found[1]}, here {found[2]}); {_REMEDY}"
            )

    def stated(self) -> dict[str, dict[str, Any]]:
        """What it holds, as the index says it."""
        return {name: {"dtype": a.dtype.name, "shape": list(a.shape)} for name, a in self.arrays.items()}

    def take(self, name: str, rows: Iterable[int]) -> np.ndarray:
        """Copies of some rows."""
        view, sums, chosen = self.arrays[name], self._sums[name], list(rows)
        if chosen and chosen == list(range(chosen[0], chosen[-1] + 1)):
            out = np.asarray(view.rows[chosen[0] : chosen[-1] + 1])
        else:
            out = np.empty((len(chosen), *view.shape[1:]), view.dtype)
            for place, row in enumerate(chosen):
                out[place] = view.rows[row : row + 1][0]
        for row, values in zip(chosen, out, strict=True):
            if zlib.crc32(values.data) != sums[row]:
                raise SimForcingError(
                    f"{self.path}: shard is damaged (row {row} of {name} has another checksum); {_REMEDY}"
                )
        return out


@dataclass(frozen=True)
class _View:
    """An array inside a shard that is not read yet."""

    rows: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


_DTYPES = {"F16": "float16", "F32": "float32", "F64": "float64", "BOOL": "bool"}
_DTYPES |= {f"{kind}{bits}": f"{kind.lower().replace('i', 'int').replace('u', 'uint')}{bits}"
            for kind in "IU" for bits in (8, 16, 32, 64)}  # fmt: skip


def _view(file: Any, name: str) -> _View:
    rows = file.get_slice(name)
    return _View(rows, tuple(rows.get_shape()), np.dtype(_DTYPES[rows.get_dtype()]))


def _read_index(directory: Path) -> dict[str, Any]:
    path = directory / INDEX
    try:
        index: dict[str, Any] = json.loads(path.read_text())
        kinds = isinstance(index["header"], dict) and isinstance(index["contents"], dict)
        if not kinds or not all({"file", "bytes", "arrays"} <= entry.keys() for entry in index["shards"]):
            raise SimForcingError(f"{path}: not a cache index; encode again")
    except FileNotFoundError:
        parts = directory.with_name(f"{directory.name}.parts")
        begun = "only begun, run the same 'simforcing encode' again" if parts.is_dir() else "encode the dataset first"
        raise SimForcingError(f"{directory}: not a cache (no {INDEX}); {begun}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SimForcingError(f"{path}: cannot be read ({error}); delete the cache and encode again") from error
    return index


def source_hash(root: Path) -> str:
    """sha256 of a dataset directory for a cache header: every file's name and size, the whole content of
    metadata and tables, and of other files (videos) the first and last 64 KiB."""
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(root).as_posix()}\0{size}\0".encode())
        with path.open("rb") as file:
            if path.suffix in {".json", ".jsonl", ".parquet"} or size <= 2 * _EDGE:
                digest.update(file.read())
            else:
                digest.update(file.read(_EDGE))
                file.seek(-_EDGE, os.SEEK_END)
                digest.update(file.read())
    return digest.hexdigest()
