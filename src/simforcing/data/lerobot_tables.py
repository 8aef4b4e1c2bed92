"""Parquet and JSON of LeRobot datasets as columns; what is wrong goes to `Problems`, what is left is returned.

Shapes: N rows of a file, D width of a vector column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32

from simforcing.data.lerobot_format import ACTION, STATE
from simforcing.data.problems import Problems
from simforcing.errors import SimForcingError

COLUMNS = (STATE, ACTION, "timestamp", "frame_index", "episode_index", "task_index")
"""Columns of a data file that are used."""


@dataclass(frozen=True)
class RowFile:
    """The columns of one data file that are used and there, and where each episode lies in it."""

    columns: Mapping[str, np.ndarray]
    spans: Mapping[int, tuple[int, int]]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises SimForcingError if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SimForcingError(f"{path}: cannot be read as JSON ({error}); restore it") from error
    if not isinstance(content, dict):
        raise SimForcingError(f"{path}: holds no JSON object; restore it")
    return content


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """One JSON object a line, empty lines aside. Raises SimForcingError with the number of a line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise SimForcingError(f"{path}: file is missing; download or restore it") from None
    except (OSError, ValueError) as error:
        raise SimForcingError(f"{path}: cannot be read as text ({error}); restore it") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:
            raise SimForcingError(f"{path}, line {number}: not JSON ({error}); restore it") from error
        if not isinstance(content, dict):
            raise SimForcingError(f"{path}, line {number}: holds no JSON object; restore it")
        found.append(content)
    return found


def read_table(
    path: Path, columns: Sequence[str], problems: Problems, episode: int | None = None
) -> dict[str, pa.ChunkedArray]:
    """Columns of a parquet file by name: those asked for, or all.

    Reports a column that is there twice (the first is used) or not at all (it is left out). Raises SimForcingError
    if the file is missing or damaged.
    """
    try:
        with pq.ParquetFile(path) as file:
            names: list[str] = file.schema_arrow.names
            double = sorted({name for name in names if names.count(name) > 1})
            for name in double:
                message = f"{path}: column {name!r} is there twice; re-export the dataset"
                problems.error("duplicate_column", message, episode=episode, file=path)
            for name in columns:
                if name not in names:
                    problems.error(
                        "missing_column",
                        f"{path}: no column {name!r} (there are: {', '.join(names)}); re-export the dataset",
                        episode=episode,
                        file=path,
                    )
            if double:
                table = file.read()
            else:
                table = file.read(columns=[name for name in columns if name in names] if columns else None)
            places = {name: i for i, name in reversed(list(enumerate(table.column_names)))}
            return {name: table.column(places[name]) for name in columns or places if name in places}
    except FileNotFoundError:
        raise SimForcingError(f"{path}: file is missing; download or restore it") from None
    except (OSError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SimForcingError(f"{path}: cannot be read as parquet ({reason}); restore it") from error


def read_rows(path: Path, problems: Problems, episode: int | None = None) -> RowFile:
    """A data file, which holds one episode or many. Columns that cannot be used are reported and left out."""
    table = read_table(path, COLUMNS, problems, episode)
    columns: dict[str, np.ndarray] = {}
    for name, column in table.items():
        try:
            columns[name] = _column(path, name, column.combine_chunks())
        except SimForcingError as error:
            problems.error("missing_value", str(error), episode=episode, file=path)
    return RowFile(columns, _spans(path, columns.get("episode_index"), problems))


def _spans(path: Path, numbers: np.ndarray | None, problems: Problems) -> dict[int, tuple[int, int]]:
    if numbers is None:
        return {}
    edges: list[int] = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    spans: dict[int, tuple[int, int]] = {}
    for first, last in pairwise(edges):
        if first == last:
            continue
        number = int(numbers[first])
        if number in spans:
            message = f"{path}: rows of episode {number} are not together; re-export the dataset"
            problems.error("contradicting_metadata", message, episode=number, file=path)
        else:
            spans[number] = (first, last)
    return spans


def _column(path: Path, name: str, column: pa.Array) -> np.ndarray:
    """One column as an array: vectors float32 [N, D] (missing numbers as NaN), others [N] as stored."""
    if name in (STATE, ACTION):
        return _vectors(path, name, column)
    if column.null_count:
        raise SimForcingError(f"{path}: column {name} has {column.null_count} missing values; re-export the dataset")
    if pa.types.is_nested(column.type):
        column = column.flatten()
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _vectors(path: Path, name: str, column: pa.Array) -> Float32[np.ndarray, "N D"]:
    if column.null_count:
        raise SimForcingError(
            f"{path}: column {name} has {column.null_count} rows without a value; re-export the dataset"
        )
    if not pa.types.is_nested(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False), np.float32).reshape(-1, 1)
    flat = column.flatten()
    width, rest = divmod(len(flat), max(len(column), 1))
    widths = {width} if pa.types.is_fixed_size_list(column.type) else set(np.diff(column.offsets).tolist())
    if rest or (widths != {width} and len(column)):
        raise SimForcingError(f"{path}: rows of {name} differ in width; re-export the dataset")
    return np.asarray(flat.to_numpy(zero_copy_only=False), np.float32).reshape(len(column), width)
