"""Encoded latents and text on disk: safetensors shards under a header that says exactly what they were made
from.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from simforcing.errors import SimForcingError
from simforcing.files import partial_path

INDEX = "index.json"
_EDGE = 1 << 16


def write_cache(directory: Path, header: Mapping[str, Any], shards: Iterable[Mapping[str, np.ndarray]]) -> Path:
    """Write shards of named arrays as they come (one in memory at a time); the directory appears when all are
    done.

    header: JSON-able; by convention it names codec, normalisation, clip rule, resolution and source hash. It
    is stored in `index.json` and in every shard. An array name may occur in several shards: `read_cache`
    joins them along the first axis. Raises SimForcingError if the directory exists, the header is not
    JSON-able or there is no shard.
    """
    if directory.exists():
        raise SimForcingError(f"{directory}: already exists and is not overwritten; choose another name or delete it")
    try:
        text = json.dumps(header, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SimForcingError(
            f"{directory}: cache header cannot be stored as JSON ({error}); use plain values"
        ) from error
    partial = partial_path(directory)
    partial.mkdir(parents=True)
    try:
        entries = []
        for number, shard in enumerate(shards):
            name = f"shard-{number:05d}.safetensors"
            arrays = {key: np.ascontiguousarray(array) for key, array in shard.items()}
            save_file(arrays, partial / name, metadata={"header": text})
            shapes = {key: list(array.shape) for key, array in sorted(arrays.items())}
            entries.append({"file": name, "arrays": shapes})
        if not entries:
            raise SimForcingError(f"{directory}: no shards to cache; the selection is empty")
        index = {"header": json.loads(text), "shards": entries}
        (partial / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return directory


def read_header(directory: Path) -> dict[str, Any]:
    """The header of a cache. Raises SimForcingError if it is not a (complete) cache."""
    header: dict[str, Any] = _read_index(directory)["header"]
    return header


def read_cache(directory: Path, expect: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """All arrays of a cache, those in several shards joined along the first axis.

    Every key of `expect` must be in the header with an equal value (keys of the header that are not expected
    are not looked at). Raises SimForcingError naming the key and both values if not, and if a shard is
    missing, damaged or from another cache.
    """
    index = _read_index(directory)
    header = index["header"]
    for key, wanted in json.loads(json.dumps(dict(expect))).items():
        found = header.get(key, "nothing")
        if key not in header or found != wanted:
            raise SimForcingError(
                f"{directory}: cache was made with {key} = {found}, now {key} = {wanted}; "
                "encode again to a new directory"
            )
    parts: dict[str, list[np.ndarray]] = {}
    for entry in index["shards"]:
        for name, array in _read_shard(directory / entry["file"], entry["arrays"]).items():
            parts.setdefault(name, []).append(array)
    return {name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for name, arrays in parts.items()}


def _read_index(directory: Path) -> dict[str, Any]:
    path = directory / INDEX
    try:
        index = json.loads(path.read_text())
        if not isinstance(index["header"], dict) or not all("file" in e and "arrays" in e for e in index["shards"]):
            raise SimForcingError(f"{path}: not a cache index; encode again")
    except FileNotFoundError:
        raise SimForcingError(f"{directory}: not a cache (no {INDEX}); encode the dataset first") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SimForcingError(f"{path}: cannot be read ({error}); delete the cache and encode again") from error
    return dict(index)


def _read_shard(path: Path, shapes: Mapping[str, list[int]]) -> dict[str, np.ndarray]:
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise SimForcingError(
            f"{path}: shard is missing or damaged ({error}); delete the cache and encode again"
        ) from error
    if {name: list(array.shape) for name, array in arrays.items()} != dict(shapes):
        raise SimForcingError(f"{path}: shard does not hold what {INDEX} says; delete the cache and encode again")
    return arrays


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
