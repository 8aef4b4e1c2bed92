"""Reads LeRobot datasets: v3.0 (many episodes a file) and v2.1, v2.0 (one file an episode).

The writer is in `lerobot_writer` and reachable from here; the tables are read by `lerobot_tables`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from simforcing.data import lerobot_format as layout
from simforcing.data.episode import ActionConvention, Dataset, StateConvention
from simforcing.data.lerobot_format import ACTION, STATE
from simforcing.data.lerobot_tables import RowFile, read_json, read_json_lines, read_rows, read_table
from simforcing.data.lerobot_writer import LeRobotWriter
from simforcing.data.problems import Problems
from simforcing.data.source import Rows, Source, Survey, VideoFootage, assemble
from simforcing.data.video import VideoFile
from simforcing.errors import SimForcingError

__all__ = ["LeRobotWriter", "open_lerobot", "survey_lerobot"]

VERSIONS = ("v3.0", "v2.1", "v2.0")

_INFO_KEYS = ("fps", "features", "data_path", "total_episodes")
_EULER = {"roll", "pitch", "yaw"}
_QUATERNION = ({"qx", "qy", "qz", "qw"}, {"rot_x", "rot_y", "rot_z", "rot_w"})


def open_lerobot(root: Path) -> Dataset:
    """Open a LeRobot dataset: reads and checks its metadata; rows and pictures are read when asked for.

    Raises SimForcingError, naming file and remedy, if it is not such a dataset, has another version, or its
    metadata are incomplete or contradict each other.
    """
    return assemble(survey_lerobot(root, Problems(strict=True)))


def survey_lerobot(root: Path, problems: Problems) -> Survey:
    """What the metadata say, and that every file they name is there. Raises SimForcingError if `info.json` is none."""
    info = _read_info(root, problems)
    reader = _Reader(root, info, _cameras(root, info, problems))
    if info["codebase_version"] == layout.VERSION:
        reader.read_packed(problems)
    else:
        reader.read_single(problems)
    reader.check(problems)
    meta = read_json(root / layout.EXTRA) if (root / layout.EXTRA).exists() else {}
    state_names, action_names = (_names(info["features"].get(name, {})) for name in (STATE, ACTION))
    return Survey(
        root=root,
        format=f"LeRobot {info['codebase_version']}",
        fps=reader.fps,
        robot=str(info.get("robot_type") or "unknown"),
        cameras=reader.cameras,
        convention=_convention(root, meta, action_names, reader.fps),
        state_convention=_state_convention(root, meta, state_names),
        sources=[reader.source(index) for index in range(len(reader.episodes))],
        state_names=state_names,
        action_names=action_names,
        meta=meta,
        splits=_splits(root, info, len(reader.episodes), problems),
    )


@dataclass
class _Reader:
    """Makes episodes of one dataset; keeps the (small) columns of packed data files that it has read.

    episodes: the rows of the episodes table, in order, with None for what is missing.
    """

    root: Path
    info: dict[str, Any]
    cameras: tuple[str, ...]
    episodes: list[dict[str, Any]] = field(default_factory=list)
    tasks: dict[int, str] = field(default_factory=dict)
    files: dict[Path, RowFile] = field(default_factory=dict)
    videos: dict[Path, VideoFile] = field(default_factory=dict)

    @property
    def fps(self) -> float:
        """Rows a second."""
        return float(self.info["fps"])

    @property
    def packed(self) -> bool:
        """Whether files hold many episodes (v3.0)."""
        return bool(self.info["codebase_version"] == layout.VERSION)

    def where(self, index: int) -> str:
        """The episode in words, for messages."""
        return f"episode {index} of {self.root}"

    def read_packed(self, problems: Problems) -> None:
        """Episodes and tasks of v3.0, from parquet."""
        self.episodes = _packed_episodes(self.root, self.cameras, problems)
        self.tasks = _packed_tasks(self.root, problems)

    def read_single(self, problems: Problems) -> None:
        """Episodes and tasks of v2, from JSON lines."""
        path = self.root / layout.EPISODES_V2
        rows = read_json_lines(path)
        for row in rows:
            for name in ("episode_index", "length"):
                if not isinstance(row.get(name), int):
                    raise SimForcingError(f"{path}: an episode has no {name}; re-export the dataset")
        self.episodes = sorted(rows, key=lambda row: int(row["episode_index"]))
        try:
            found = read_json_lines(self.root / layout.TASKS_V2)
            self.tasks = {int(row["task_index"]): str(row["task"]) for row in found}
        except SimForcingError as error:
            problems.error("missing_file", str(error), file=self.root / layout.TASKS_V2)
        except (KeyError, TypeError, ValueError):
            message = f"{self.root / layout.TASKS_V2}: needs task_index and task on every line; re-export"
            problems.error("missing_column", message, file=self.root / layout.TASKS_V2)

    def check(self, problems: Problems) -> None:
        """Everything that the metadata alone can tell, and that every file named by them is there."""
        listing = layout.EPISODES_DIR if self.packed else layout.EPISODES_V2
        info, total = self.root / layout.INFO, self.info["total_episodes"]
        if total != len(self.episodes):
            message = f"{info}: says {total} episodes, {listing} lists {len(self.episodes)}; re-export"
            problems.error("contradicting_metadata", message, file=info)
        for index, row in enumerate(self.episodes):
            self._check_row(index, row, listing, problems)
        self._check_totals(problems)
        for index in range(len(self.episodes)):
            path = self.data_path(index)
            if path is not None and not path.is_file():
                message = f"{path}: data file is missing; download or restore it"
                problems.error("missing_table", message, episode=index, file=path)
        for index in range(len(self.episodes)):
            for key in self.cameras:
                path = self.video_path(index, key)
                if path is not None:
                    file = self.videos.setdefault(path, VideoFile(path, self.fps))
                    file.report(problems, index)

    def _check_row(self, index: int, row: Mapping[str, Any], listing: str, problems: Problems) -> None:
        where, file = self.where(index), self.root / listing
        if row["episode_index"] != index:
            message = f"{where}: {listing} has number {row['episode_index']} there; re-export"
            problems.error("contradicting_metadata", message, episode=index, file=file)
        if not self.packed or row["length"] is None:
            return
        first, last = row["dataset_from_index"], row["dataset_to_index"]
        if None not in (first, last) and last - first != row["length"]:
            message = f"{where}: length {row['length']} but rows {first} to {last}; re-export"
            problems.error("contradicting_metadata", message, episode=index, file=file)
        for key in self.cameras:
            start, end = row[f"videos/{key}/from_timestamp"], row[f"videos/{key}/to_timestamp"]
            if None not in (start, end) and abs((end - start) * self.fps - row["length"]) > 0.5:
                frames = (end - start) * self.fps
                message = f"{where}: {row['length']} rows but {frames:.0f} frames of {key} by its timestamps; re-export"
                problems.error("length_mismatch", message, episode=index, file=file)

    def _check_totals(self, problems: Problems) -> None:
        """Counts in info.json that nothing depends on: a contradiction is a warning."""
        counts = {
            "total_frames": sum(row["length"] or 0 for row in self.episodes),
            "total_tasks": len(self.tasks),
            "total_videos": len(self.episodes) * len(self.cameras),
        }
        if self.packed:
            counts.pop("total_videos")
        path = self.root / layout.INFO
        for name, count in counts.items():
            if name in self.info and self.info[name] != count:
                problems.warn(
                    "contradicting_metadata", f"{path}: {name} is {self.info[name]}, found {count}", file=path
                )

    def source(self, index: int) -> Source:
        """One episode; a camera whose place is unknown is left out of its footage."""
        row = self.episodes[index]
        tasks = row.get("tasks") or [""]
        footage = {}
        for key in self.cameras:
            path = self.video_path(index, key)
            if path is not None:
                start = float(row[f"videos/{key}/from_timestamp"] or 0.0) if self.packed else 0.0
                stated = row["length"] if self.packed else None
                footage[key] = VideoFootage(self.videos[path], start, stated)
        file = self.data_path(index) or self.root / layout.EPISODES_DIR
        return Source(index, self.where(index), file, row["length"], str(tasks[0]), footage, partial(self.load, index))

    def data_path(self, index: int) -> Path | None:
        """Data file of an episode; None where the metadata do not say."""
        row = self.episodes[index]
        if not self.packed:
            return self._fill("data_path", index, episode_chunk=index // int(self.info.get("chunks_size") or 1000))
        places = {"chunk_index": row["data/chunk_index"], "file_index": row["data/file_index"]}
        return None if None in places.values() else self._fill("data_path", index, **places)

    def video_path(self, index: int, key: str) -> Path | None:
        """Video file of an episode and camera; None where the metadata do not say."""
        row = self.episodes[index]
        if not self.packed:
            chunk = index // int(self.info.get("chunks_size") or 1000)
            return self._fill("video_path", index, video_key=key, episode_chunk=chunk)
        places = {"chunk_index": row[f"videos/{key}/chunk_index"], "file_index": row[f"videos/{key}/file_index"]}
        return None if None in places.values() else self._fill("video_path", index, video_key=key, **places)

    def _fill(self, template: str, index: int, **values: Any) -> Path:
        try:
            return self.root / str(self.info[template]).format(episode_index=index, **values)
        except (KeyError, IndexError, ValueError) as error:
            raise SimForcingError(
                f"{self.root / layout.INFO}: {template} {self.info.get(template)!r} is not a "
                f"{self.info['codebase_version']} path; re-export"
            ) from error

    def load(self, index: int, problems: Problems) -> Rows:
        """One episode's rows from the data file, compared with the metadata."""
        row, where, path = self.episodes[index], self.where(index), self.data_path(index)
        if path is None:
            problems.error("missing_table", f"{where}: the metadata name no data file; re-export", episode=index)
            return Rows()
        rows = self._rows(path, index, problems)
        if index not in rows.spans:
            problems.error("missing_table", f"{where}: no rows in {path}; re-export", episode=index, file=path)
            return Rows()
        first, last = rows.spans[index]
        if row["length"] is not None and last - first != row["length"]:
            message = f"{where}: length {row['length']} but {last - first} rows in {path}; re-export"
            problems.error("length_mismatch", message, episode=index, file=path)
        cut = {name: column[first:last] for name, column in rows.columns.items()}
        self._check_time(index, path, cut, problems)
        numbers: list[int] = np.unique(cut["task_index"]).tolist() if "task_index" in cut else []
        for number in numbers:
            if number not in self.tasks:
                listing = self.root / (layout.TASKS if self.packed else layout.TASKS_V2)
                message = f"{where}: task index {number} is not in {listing} ({len(self.tasks)} tasks); re-export"
                problems.error("contradicting_metadata", message, episode=index, file=listing)
        for name in set(cut) & {STATE, ACTION}:
            self._check_width(index, path, name, cut[name], problems)
        first_task = self.tasks.get(int(cut["task_index"][0])) if "task_index" in cut else None
        listed = row.get("tasks") or []
        if first_task is not None and listed and first_task not in listed:
            message = f"{where}: its rows say {first_task!r}, the list of episodes {listed[0]!r}"
            problems.warn("contradicting_metadata", message, episode=index, file=path)
        return Rows(
            state=cut[STATE].copy() if STATE in cut else None,
            action=cut[ACTION].copy() if ACTION in cut else None,
            timestamps=cut["timestamp"].astype(np.float64) if "timestamp" in cut else None,
            frame_index=cut.get("frame_index"),
            tasks=() if first_task is None else (first_task,),
        )

    def _check_width(self, index: int, path: Path, name: str, column: np.ndarray, problems: Problems) -> None:
        shape = self.info["features"].get(name, {}).get("shape")
        if shape and list(shape) != list(column.shape[1:]):
            message = f"{path}: {name} has {column.shape[1]} numbers a row, {layout.INFO} says {shape}"
            problems.warn("contradicting_metadata", message, episode=index, file=path)

    def _check_time(self, index: int, path: Path, cut: Mapping[str, np.ndarray], problems: Problems) -> None:
        where = self.where(index)
        if "frame_index" in cut:
            steps = np.arange(len(cut["frame_index"]))
            if not np.array_equal(cut["frame_index"], steps):
                message = f"{where}: frame_index does not count 0 to {len(steps) - 1}; rows are missing, re-export"
                problems.error("missing_rows", message, episode=index, file=path)
        if "timestamp" in cut and np.isfinite(cut["timestamp"]).all():
            times = cut["timestamp"].astype(np.float64)
            late = np.abs((times - times[0]) * self.fps - np.arange(len(times)))
            if late.max() > 0.5:
                message = (
                    f"{where}: timestamp of row {int(late.argmax())} does not fit {self.fps:g} rows a second; "
                    "correct fps or re-export"
                )
                problems.error("timestamps", message, episode=index, file=path)

    def _rows(self, path: Path, index: int, problems: Problems) -> RowFile:
        if not self.packed:
            rows = read_rows(path, problems, index)
            others = [number for number in rows.spans if number != index]
            if others and index not in rows.spans:
                message = f"{self.where(index)}: {path} holds rows of episode {others[0]}; re-export"
                problems.error("contradicting_metadata", message, episode=index, file=path)
            return rows
        if path not in self.files:
            self.files[path] = read_rows(path, problems)
        return self.files[path]


def _read_info(root: Path, problems: Problems) -> dict[str, Any]:
    path = root / layout.INFO
    if not path.is_file():
        raise SimForcingError(f"{root}: not a LeRobot dataset (no {layout.INFO}); give the directory that holds meta/")
    info = read_json(path)
    version = info.get("codebase_version")
    if version is None:
        raise SimForcingError(f"{path}: no codebase_version, so not a LeRobot dataset; re-export it as LeRobot v3.0")
    if version not in VERSIONS:
        raise SimForcingError(
            f"{path}: LeRobot {version} is not readable by this version, only {', '.join(VERSIONS)}; "
            "convert it with LeRobot's own tool"
        )
    for key in _INFO_KEYS:
        if key not in info:
            raise SimForcingError(f"{path}: no {key}; the file is incomplete, re-export the dataset")
    if not isinstance(info["fps"], (int, float)) or not info["fps"] > 0:
        raise SimForcingError(f"{path}: fps is {info['fps']!r}; correct it to the rate of the recording")
    features = info["features"]
    if not isinstance(features, dict) or not all(isinstance(value, dict) for value in features.values()):
        raise SimForcingError(f"{path}: features is no table of features; re-export the dataset")
    for name in (STATE, ACTION):
        if name not in features:
            message = f"{path}: no feature {name!r} (there are: {', '.join(features)}); it is needed, re-export"
            problems.error("missing_column", message, file=path)
    return info


def _cameras(root: Path, info: Mapping[str, Any], problems: Problems) -> tuple[str, ...]:
    features: Mapping[str, Mapping[str, Any]] = info["features"]
    cameras = tuple(key for key, feature in features.items() if feature.get("dtype") == "video")
    if not cameras:
        message = f"{root / layout.INFO}: no camera of dtype 'video'; export the pictures as video"
        problems.error("no_camera", message, file=root / layout.INFO)
    return cameras


def _names(feature: Mapping[str, Any]) -> tuple[str, ...]:
    """Dimension names of a feature, whether stored as a list, a list of lists or a dict of lists."""
    names = feature.get("names") or []
    groups = names.values() if isinstance(names, dict) else [names]
    flat: list[Any] = []
    for group in groups:
        for name in group if isinstance(group, list) else []:
            flat += name if isinstance(name, list) else [name]
    return tuple(str(name) for name in flat)


def _rotation(names: Sequence[str]) -> Any:
    if set(names) >= _EULER:
        return "euler_xyz"
    return "quaternion" if any(set(names) >= known for known in _QUATERNION) else "rotvec"


def _convention(root: Path, meta: Mapping[str, Any], action_names: Sequence[str], fps: float) -> ActionConvention:
    if ACTION in meta:
        try:
            return ActionConvention.from_dict(meta[ACTION])
        except SimForcingError as error:
            raise SimForcingError(f"{root / layout.EXTRA}: {error}") from error
    return ActionConvention(rotation=_rotation(action_names), hz=fps)


def _state_convention(root: Path, meta: Mapping[str, Any], names: Sequence[str]) -> StateConvention | None:
    if "state" in meta:
        try:
            return StateConvention.from_dict(meta["state"])
        except SimForcingError as error:
            raise SimForcingError(f"{root / layout.EXTRA}: {error}") from error
    if not {"x", "y", "z"} <= set(names):
        return None
    return StateConvention(rotation=_rotation(names))


def _splits(root: Path, info: Mapping[str, Any], count: int, problems: Problems) -> dict[str, list[int]]:
    """`{"train": "0:10"}` as positions; what is no such range is left out."""
    splits: dict[str, list[int]] = {}
    if not isinstance(info.get("splits") or {}, dict):
        return splits
    for name, span in (info.get("splits") or {}).items():
        first, colon, last = str(span).partition(":")
        if colon and first.isdigit() and last.isdigit():
            splits[str(name)] = list(range(int(first), min(int(last), count)))
            if int(last) > count:
                path = root / layout.INFO
                message = f"{path}: split {name!r} is {span} but there are {count} episodes"
                problems.warn("contradicting_metadata", message, file=path)
    return splits


def _packed_episodes(root: Path, cameras: Sequence[str], problems: Problems) -> list[dict[str, Any]]:
    """The episodes table in order, without its statistics; None where a value is missing."""
    needed = ["episode_index", "tasks", "length", "data/chunk_index", "data/file_index"]
    needed += ["dataset_from_index", "dataset_to_index"]
    parts = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    needed += [f"videos/{key}/{part}" for key in cameras for part in parts]
    paths = sorted((root / layout.EPISODES_DIR).glob("chunk-*/file-*.parquet"))
    if not paths:
        raise SimForcingError(f"{root / layout.EPISODES_DIR}: no chunk-*/file-*.parquet in it; download or restore it")
    rows: list[dict[str, Any]] = []
    for path in paths:
        table = read_table(path, needed, problems)
        for name, column in table.items():
            if column.null_count:
                message = f"{path}: column {name!r} has missing values; re-export the dataset"
                problems.error("missing_value", message, file=path)
        values = {name: column.to_pylist() for name, column in table.items()}
        count = len(next(iter(values.values()), []))
        rows += [{name: values[name][i] if name in values else None for name in needed} for i in range(count)]
    known = [row for row in rows if row["episode_index"] is not None]
    return sorted(known, key=lambda row: int(row["episode_index"]))


def _packed_tasks(root: Path, problems: Problems) -> dict[int, str]:
    path = root / layout.TASKS
    try:
        table = read_table(path, (), problems)
    except SimForcingError as error:
        problems.error("missing_file", str(error), file=path)
        return {}
    text = next((name for name in ("task", "__index_level_0__") if name in table), None)
    if text is None or "task_index" not in table:
        message = f"{path}: needs columns task_index and task (there are: {', '.join(table)})"
        problems.error("missing_column", message, file=path)
        return {}
    return dict(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True))
