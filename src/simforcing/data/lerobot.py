"""Reads LeRobot v3.0 datasets; the writer is in `lerobot_writer` and reachable from here.

Shapes: N rows of an episode, S state width, A action width, n frames asked for, H W picture size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32, UInt8

from simforcing.data import lerobot_format as layout
from simforcing.data.episode import ActionConvention, Dataset, Episode
from simforcing.data.lerobot_format import ACTION, STATE
from simforcing.data.lerobot_writer import LeRobotWriter
from simforcing.data.video import VideoFile
from simforcing.errors import SimForcingError

__all__ = ["LeRobotWriter", "open_lerobot"]

_INFO_KEYS = ("fps", "features", "data_path", "total_episodes")
_EULER = {"roll", "pitch", "yaw"}


def open_lerobot(root: Path) -> Dataset:
    """Open a LeRobot v3.0 dataset: reads and checks its metadata; rows and pictures are read when asked for.

    Raises SimForcingError, naming file and remedy, if it is not such a dataset, has another version, or its
    metadata are incomplete or contradict each other.
    """
    info = _read_info(root)
    cameras = _cameras(root, info)
    reader = _Reader(root, info, cameras, _read_episodes(root, cameras), _read_tasks(root))
    reader.check()
    meta = _read_json(root / layout.EXTRA) if (root / layout.EXTRA).exists() else {}
    state_names, action_names = (_names(info["features"][name]) for name in (STATE, ACTION))
    return Dataset(
        root,
        fps=reader.fps,
        robot=str(info.get("robot_type") or "unknown"),
        cameras=cameras,
        action_convention=_convention(root, meta, action_names, reader.fps),
        meta=meta,
        lengths=[row["length"] for row in reader.episodes],
        tasks=[(row["tasks"] or [""])[0] for row in reader.episodes],
        state_names=state_names,
        action_names=action_names,
        load=reader.load,
    )


@dataclass(frozen=True)
class _Rows:
    """The columns of one data file that are used, and where each episode lies in it."""

    columns: dict[str, np.ndarray]
    spans: dict[int, tuple[int, int]]


@dataclass
class _Reader:
    """Makes episodes of one dataset; keeps the (small) columns of the data files that it has read."""

    root: Path
    info: dict[str, Any]
    cameras: tuple[str, ...]
    episodes: list[dict[str, Any]]
    tasks: dict[int, str]
    files: dict[Path, _Rows] = field(default_factory=dict)
    videos: dict[Path, VideoFile] = field(default_factory=dict)

    @property
    def fps(self) -> float:
        return float(self.info["fps"])

    def check(self) -> None:
        """Everything that the metadata alone can tell, and that every file named by them is there."""
        total = self.info["total_episodes"]
        if total != len(self.episodes):
            raise SimForcingError(
                f"{self.root / layout.INFO}: says {total} episodes, {layout.EPISODES_DIR} lists "
                f"{len(self.episodes)}; re-export"
            )
        for index, row in enumerate(self.episodes):
            where = self._where(index)
            if row["episode_index"] != index:
                raise SimForcingError(
                    f"{where}: {layout.EPISODES_DIR} has number {row['episode_index']} there; re-export"
                )
            if row["dataset_to_index"] - row["dataset_from_index"] != row["length"]:
                raise SimForcingError(
                    f"{where}: length {row['length']} but rows {row['dataset_from_index']} to "
                    f"{row['dataset_to_index']}; re-export"
                )
            for key in self.cameras:
                seconds = row[f"videos/{key}/to_timestamp"] - row[f"videos/{key}/from_timestamp"]
                if abs(seconds * self.fps - row["length"]) > 0.5:
                    raise SimForcingError(
                        f"{where}: {row['length']} rows but {seconds * self.fps:.0f} frames of {key} by "
                        "its timestamps; re-export"
                    )
        for path in dict.fromkeys(self._data_path(index) for index in range(total)):
            if not path.is_file():
                raise SimForcingError(f"{path}: data file is missing; download or restore it")
        for path in dict.fromkeys(self._video_path(index, key) for index in range(total) for key in self.cameras):
            self.videos[path] = VideoFile(path, self.fps)
            self.videos[path].check()

    def _where(self, index: int) -> str:
        return f"episode {index} of {self.root}"

    def _data_path(self, index: int) -> Path:
        row = self.episodes[index]
        return self._fill("data_path", index, chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])

    def _video_path(self, index: int, key: str) -> Path:
        row = self.episodes[index]
        chunk, file = row[f"videos/{key}/chunk_index"], row[f"videos/{key}/file_index"]
        return self._fill("video_path", index, video_key=key, chunk_index=chunk, file_index=file)

    def _fill(self, template: str, index: int, **values: Any) -> Path:
        try:
            return self.root / str(self.info[template]).format(episode_index=index, **values)
        except (KeyError, IndexError, ValueError) as error:
            raise SimForcingError(
                f"{self.root / layout.INFO}: {template} {self.info.get(template)!r} is not a v3.0 path; re-export"
            ) from error

    def load(self, index: int) -> Episode:
        """One episode: its rows from the data file, checked against the metadata."""
        row, where, path = self.episodes[index], self._where(index), self._data_path(index)
        rows = self._rows(path)
        if index not in rows.spans:
            raise SimForcingError(f"{where}: no rows in {path}; re-export")
        first, last = rows.spans[index]
        if last - first != row["length"]:
            raise SimForcingError(f"{where}: length {row['length']} but {last - first} rows in {path}; re-export")
        cut = {name: column[first:last] for name, column in rows.columns.items()}
        self._check_time(where, cut)
        task_index = int(cut["task_index"][0])
        for number in np.unique(cut["task_index"]).tolist():
            if number not in self.tasks:
                raise SimForcingError(
                    f"{where}: task index {number} is not in {self.root / layout.TASKS} ({len(self.tasks)} "
                    "tasks); re-export"
                )
        for name in (STATE, ACTION):
            if not np.isfinite(cut[name]).all():
                raise SimForcingError(f"{where}: {name} has values that are missing or not finite; repair {path}")
        timestamps = cut["timestamp"].astype(np.float64)
        return Episode(
            index=index,
            fps=self.fps,
            task=self.tasks[task_index],
            cameras=self.cameras,
            state=cut[STATE].copy(),
            action=cut[ACTION].copy(),
            timestamps=timestamps - timestamps[0],
            where=where,
            decode=self.decode,
        )

    def _check_time(self, where: str, cut: Mapping[str, np.ndarray]) -> None:
        steps = np.arange(len(cut["timestamp"]))
        if not np.array_equal(cut["frame_index"], steps):
            raise SimForcingError(
                f"{where}: frame_index does not count 0 to {len(steps) - 1}; rows are missing, re-export"
            )
        late = np.abs((cut["timestamp"] - cut["timestamp"][0]) * self.fps - steps)
        if late.max() > 0.5:
            worst = int(late.argmax())
            raise SimForcingError(
                f"{where}: timestamp of row {worst} does not fit {self.fps:g} rows a second; correct fps or re-export"
            )

    def _rows(self, path: Path) -> _Rows:
        if path not in self.files:
            self.files[path] = _read_rows(path)
        return self.files[path]

    def decode(self, index: int, camera: str, rows: Sequence[int]) -> UInt8[np.ndarray, "n H W 3"]:
        """Frames of one camera by row number."""
        start = float(self.episodes[index][f"videos/{camera}/from_timestamp"])
        return self.videos[self._video_path(index, camera)].at([start + row / self.fps for row in rows])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SimForcingError(f"{path}: cannot be read as JSON ({error}); restore it") from error
    if not isinstance(content, dict):
        raise SimForcingError(f"{path}: holds no JSON object; restore it")
    return content


def _read_info(root: Path) -> dict[str, Any]:
    path = root / layout.INFO
    if not path.is_file():
        raise SimForcingError(f"{root}: not a LeRobot dataset (no {layout.INFO}); give the directory that holds meta/")
    info = _read_json(path)
    version = info.get("codebase_version")
    if version is None:
        raise SimForcingError(f"{path}: no codebase_version, so not a LeRobot dataset; re-export it as LeRobot v3.0")
    if version != layout.VERSION:
        raise SimForcingError(
            f"{path}: LeRobot {version} is not readable by this version, only {layout.VERSION}; "
            "convert it with LeRobot's own tool"
        )
    for key in _INFO_KEYS:
        if key not in info:
            raise SimForcingError(f"{path}: no {key}; the file is incomplete, re-export the dataset")
    if not isinstance(info["fps"], (int, float)) or not info["fps"] > 0:
        raise SimForcingError(f"{path}: fps is {info['fps']!r}; correct it to the rate of the recording")
    features = info["features"]
    for name in (STATE, ACTION):
        if name not in features:
            raise SimForcingError(
                f"{path}: no feature {name!r} (there are: {', '.join(features)}); it is needed, re-export"
            )
    return info


def _cameras(root: Path, info: Mapping[str, Any]) -> tuple[str, ...]:
    features: Mapping[str, Mapping[str, Any]] = info["features"]
    cameras = tuple(key for key, feature in features.items() if feature.get("dtype") == "video")
    if not cameras:
        raise SimForcingError(f"{root / layout.INFO}: no camera of dtype 'video'; export the pictures as video")
    return cameras


def _names(feature: Mapping[str, Any]) -> tuple[str, ...]:
    """Dimension names of a feature, whether stored as a list or as a dict of lists."""
    names = feature.get("names") or []
    if isinstance(names, dict):
        names = [name for group in names.values() if isinstance(group, list) for name in group]
    return tuple(str(name) for name in names)


def _convention(root: Path, meta: Mapping[str, Any], action_names: Sequence[str], fps: float) -> ActionConvention:
    if ACTION in meta:
        try:
            return ActionConvention.from_dict(meta[ACTION])
        except SimForcingError as error:
            raise SimForcingError(f"{root / layout.EXTRA}: {error}") from error
    euler = set(action_names) >= _EULER
    return ActionConvention(rotation="euler_xyz" if euler else "rotvec", hz=fps)


def _read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a parquet file, or some of its columns. Refuses duplicate and missing columns."""
    try:
        with pq.ParquetFile(path) as file:
            names: list[str] = file.schema_arrow.names
            double = sorted({name for name in names if names.count(name) > 1})
            if double:
                raise SimForcingError(f"{path}: column {double[0]!r} is there twice; re-export the dataset")
            for name in columns or []:
                if name not in names:
                    raise SimForcingError(
                        f"{path}: no column {name!r} (there are: {', '.join(names)}); re-export the dataset"
                    )
            return file.read(columns=list(columns) if columns else None)
    except FileNotFoundError:
        raise SimForcingError(f"{path}: file is missing; download or restore it") from None
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise SimForcingError(f"{path}: cannot be read as parquet ({reason}); restore it") from error


def _read_episodes(root: Path, cameras: Sequence[str]) -> list[dict[str, Any]]:
    """The episodes table in order, without its statistics; every column that is used is there and filled."""
    needed = ["episode_index", "tasks", "length", "data/chunk_index", "data/file_index"]
    needed += ["dataset_from_index", "dataset_to_index"]
    parts = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    needed += [f"videos/{key}/{part}" for key in cameras for part in parts]
    paths = sorted((root / layout.EPISODES_DIR).glob("chunk-*/file-*.parquet"))
    if not paths:
        raise SimForcingError(f"{root / layout.EPISODES_DIR}: no chunk-*/file-*.parquet in it; download or restore it")
    rows: list[dict[str, Any]] = []
    for path in paths:
        table = _read_table(path, needed)
        for name in needed:
            if table[name].null_count:
                raise SimForcingError(f"{path}: column {name!r} has missing values; re-export the dataset")
        rows += table.to_pylist()
    return sorted(rows, key=lambda row: int(row["episode_index"]))


def _read_tasks(root: Path) -> dict[int, str]:
    path = root / layout.TASKS
    table = _read_table(path)
    text = next((name for name in ("task", "__index_level_0__") if name in table.column_names), None)
    if text is None or "task_index" not in table.column_names:
        raise SimForcingError(f"{path}: needs columns task_index and task (there are: {', '.join(table.column_names)})")
    return dict(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True))


def _read_rows(path: Path) -> _Rows:
    names = [STATE, ACTION, "timestamp", "frame_index", "episode_index", "task_index"]
    table = _read_table(path, names)
    columns = {name: _column(path, name, table[name].combine_chunks()) for name in names}
    numbers = columns["episode_index"]
    edges: list[int] = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    spans: dict[int, tuple[int, int]] = {}
    for first, last in pairwise(edges):
        if first == last:
            continue
        if int(numbers[first]) in spans:
            raise SimForcingError(f"{path}: rows of episode {numbers[first]} are not together; re-export the dataset")
        spans[int(numbers[first])] = (first, last)
    return _Rows(columns, spans)


def _column(path: Path, name: str, column: pa.Array) -> np.ndarray:
    """One column as an array: vectors float32 [N, D] (missing numbers as NaN), others [N] as stored."""
    if name not in (STATE, ACTION):
        if column.null_count:
            raise SimForcingError(
                f"{path}: column {name} has {column.null_count} missing values; re-export the dataset"
            )
        return np.asarray(column.to_numpy(zero_copy_only=False))
    return _vectors(path, name, column)


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
    if rest or widths != {width}:
        raise SimForcingError(f"{path}: rows of {name} differ in width; re-export the dataset")
    return np.asarray(flat.to_numpy(zero_copy_only=False), np.float32).reshape(len(column), width)
