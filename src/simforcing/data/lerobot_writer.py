"""Writes LeRobot v3.0 datasets: many episodes a parquet and video file, everything in place or nothing at
all.

Shapes: N rows of an episode, S state width, A action width, H W picture size.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32, UInt8

from simforcing.data import lerobot_format as layout
from simforcing.data.episode import ActionConvention, nearest
from simforcing.data.lerobot_format import ACTION, STATE, PictureSummary, Place
from simforcing.data.video import VideoWriter
from simforcing.errors import SimForcingError
from simforcing.files import partial_path

_MB = 1024 * 1024


class _VideoTrack:
    """The packed video files of one camera; a new file begins when one has reached its size limit."""

    def __init__(self, root: Path, key: str, size: tuple[int, int], fps: float, crf: int, limit: int) -> None:
        self.root, self.key, self.size, self.fps, self.crf, self.limit = root, key, size, fps, crf, limit
        self.place: Place | None = None
        self.file: VideoWriter | None = None
        self.summary = PictureSummary()

    def add(self, frames: UInt8[np.ndarray, "N H W 3"]) -> dict[str, Any]:
        """Encode one episode; returns its columns of the episodes table."""
        if self.file is not None and self.file.bytes >= self.limit:
            self.close()
        if self.file is None:
            self.place = Place() if self.place is None else self.place.next()
            path = self.place.path(self.root, layout.VIDEO, video_key=self.key)
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = VideoWriter(path, fps=self.fps, height=self.size[0], width=self.size[1], crf=self.crf)
        assert self.place is not None
        first = self.file.count
        self.file.write(frames)
        prefix = f"videos/{self.key}"
        return {
            f"{prefix}/chunk_index": self.place.chunk,
            f"{prefix}/file_index": self.place.file,
            f"{prefix}/from_timestamp": first / self.fps,
            f"{prefix}/to_timestamp": self.file.count / self.fps,
        }

    def close(self) -> None:
        """Finish the open file, if any."""
        file, self.file = self.file, None
        if file is not None:
            file.close()


class LeRobotWriter:
    """Writes a LeRobot v3.0 dataset to `<out>.partial-<pid>` and renames it to `out` on `close()`.

    Also a context manager; if its body raises, the partial directory is removed. Frames go straight to the
    encoder and one data file's rows are held at a time. The same input gives the same bytes.

    Args:
        out: directory to make; must not exist.
        fps: frames and rows a second.
        robot: stored as `robot_type`.
        cameras: key -> (height, width), both even. Keys are used as they are (see REAL and SIM in `episode`).
        state_names, action_names: one name a dimension.
        meta: content of `meta/simforcing.json`; its `action` entry, if any, must be an `ActionConvention`
        dict.
        crf: H.264 quality, smaller is better.
        data_file_mb, video_file_mb: size at which a new parquet or video file begins.

    Raises SimForcingError if `out` exists or an argument is not usable.
    """

    def __init__(
        self,
        out: Path,
        *,
        fps: float,
        robot: str,
        cameras: Mapping[str, tuple[int, int]],
        state_names: Sequence[str],
        action_names: Sequence[str],
        meta: Mapping[str, Any] | None = None,
        crf: int = 12,
        data_file_mb: float = layout.DATA_FILE_MB,
        video_file_mb: float = layout.VIDEO_FILE_MB,
    ) -> None:
        self.out = Path(out)
        self.fps, self.robot = fps, robot
        self.cameras = {key: (int(size[0]), int(size[1])) for key, size in cameras.items()}
        self.names = {STATE: tuple(state_names), ACTION: tuple(action_names)}
        self.meta = dict(meta or {})
        self._limits = {"data": data_file_mb, "video": video_file_mb}
        self._check_arguments()
        self.partial = partial_path(self.out)
        self.partial.mkdir(parents=True)
        limit = int(video_file_mb * _MB)
        self._tracks = {
            key: _VideoTrack(self.partial, key, size, fps, crf, limit) for key, size in self.cameras.items()
        }
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._frames = 0
        self._place, self._rows, self._row_bytes = Place(), list[pa.Table](), 0
        self._values: dict[str, list[np.ndarray]] = {STATE: [], ACTION: []}
        self._closed = False

    def _check_arguments(self) -> None:
        if self.out.exists():
            raise SimForcingError(
                f"{self.out}: already exists and is not overwritten; choose another name or delete it"
            )
        if not self.fps > 0:
            raise SimForcingError(f"{self.out}: fps is {self.fps}; give a positive number")
        if not self.cameras:
            raise SimForcingError(f"{self.out}: no cameras; name at least one with its height and width")
        for key, (height, width) in self.cameras.items():
            if "/" in key or not key:
                raise SimForcingError(f"{self.out}: camera key {key!r} cannot name a directory; use dots, not slashes")
            if min(height, width) < 2 or height % 2 or width % 2:
                raise SimForcingError(
                    f"{self.out}: camera {key} is {height}x{width}; H.264 needs an even height and width"
                )
        for feature, names in self.names.items():
            if not names or len(set(names)) != len(names):
                raise SimForcingError(
                    f"{self.out}: names of {feature} are {list(names)}; give one different name a dimension"
                )
        if ACTION in self.meta:
            ActionConvention.from_dict(self.meta[ACTION])
        try:
            json.dumps(self.meta, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SimForcingError(f"{self.out}: meta cannot be stored as JSON ({error}); use plain values") from error

    def add_episode(
        self,
        frames: Mapping[str, UInt8[np.ndarray, "N H W 3"]],
        state: Float32[np.ndarray, "N S"],
        action: Float32[np.ndarray, "N A"],
        task: str,
    ) -> None:
        """Append one episode; action[i] belongs to the row of frame i.

        Raises SimForcingError, before anything is written, if cameras, shapes, lengths or types do not fit or
        a number is not finite; the message names the episode.
        """
        index = len(self._episodes)
        where = f"episode {index} of {self.out}"
        if self._closed:
            raise SimForcingError(f"{where}: the writer is closed; open a new one")
        length = self._check_frames(where, frames)
        values = {
            STATE: self._check_rows(where, STATE, state, length),
            ACTION: self._check_rows(where, ACTION, action, length),
        }
        if not isinstance(task, str):
            raise SimForcingError(f"{where}: the task is {type(task).__name__}; give the instruction as text")
        try:
            self._append(index, frames, values, task)
        except BaseException:
            self.abort()
            raise

    def _append(
        self, index: int, frames: Mapping[str, np.ndarray], values: Mapping[str, np.ndarray], task: str
    ) -> None:
        length = len(values[STATE])
        task_index = self._tasks.setdefault(task, len(self._tasks))
        columns = self._index_columns(index, length, task_index)
        row: dict[str, Any] = {"episode_index": index, "tasks": [task], "length": length}
        row |= self._add_rows(values, columns)
        stats = {name: layout.vector_summary(rows) for name, rows in {**values, **columns}.items()}
        for key, track in self._tracks.items():
            row |= track.add(frames[key])
            picture = PictureSummary()
            picture.add(frames[key])
            track.summary.merge(picture)
            stats[key] = picture.summary()
        row |= layout.episode_stats_columns(stats)
        row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        self._episodes.append(row)
        self._frames += length
        for name, rows in values.items():
            self._values[name].append(rows)

    def _check_frames(self, where: str, frames: Mapping[str, np.ndarray]) -> int:
        for key in frames:
            if key not in self.cameras:
                raise SimForcingError(f"{where}: frames for unknown camera {key!r}; {nearest(key, self.cameras)}")
        lengths: dict[str, int] = {}
        for key, (height, width) in self.cameras.items():
            if key not in frames:
                raise SimForcingError(f"{where}: no frames for camera {key}; give all of {', '.join(self.cameras)}")
            value = frames[key]
            if value.dtype != np.uint8 or value.ndim != 4 or value.shape[1:] != (height, width, 3):
                raise SimForcingError(
                    f"{where}: camera {key} has {value.dtype} {list(value.shape)}; give uint8 [N, {height}, {width}, 3]"
                )
            lengths[key] = len(value)
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{key} {count}" for key, count in lengths.items())
            raise SimForcingError(f"{where}: cameras differ in number of frames ({listed}); give as many of each")
        length = next(iter(lengths.values()))
        if length == 0:
            raise SimForcingError(f"{where}: no frames in it; leave empty episodes out")
        return length

    def _check_rows(self, where: str, name: str, rows: np.ndarray, length: int) -> Float32[np.ndarray, "N D"]:
        width = len(self.names[name])
        if not np.issubdtype(rows.dtype, np.floating):
            raise SimForcingError(f"{where}: {name} has type {rows.dtype}; give float32")
        if rows.ndim != 2 or rows.shape[1] != width:
            raise SimForcingError(f"{where}: {name} has shape {list(rows.shape)}; give [N, {width}]")
        if len(rows) != length:
            raise SimForcingError(f"{where}: {length} frames but {len(rows)} rows of {name}; give as many of each")
        if not np.isfinite(rows).all():
            raise SimForcingError(f"{where}: {name} has values that are not finite; repair or leave the episode out")
        return np.array(rows, np.float32)

    def _index_columns(self, index: int, length: int, task_index: int) -> dict[str, np.ndarray]:
        steps = np.arange(length, dtype=np.int64)
        return {
            "timestamp": (steps / self.fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(length, index, np.int64),
            "index": steps + self._frames,
            "task_index": np.full(length, task_index, np.int64),
        }

    def _add_rows(self, values: Mapping[str, np.ndarray], columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Queue one episode's rows for the current data file; returns where they will be."""
        if self._row_bytes >= self._limits["data"] * _MB:
            self._write_rows()
            self._place = self._place.next()
        arrays = {
            name: pa.array(rows.ravel())
            if rows.shape[1] == 1
            else pa.FixedSizeListArray.from_arrays(rows.ravel(), type=layout.vector_type(rows.shape[1]))
            for name, rows in values.items()
        }
        table = pa.table(arrays | {name: pa.array(column) for name, column in columns.items()})
        self._rows.append(table)
        self._row_bytes += table.nbytes
        first = self._frames
        return {
            "data/chunk_index": self._place.chunk,
            "data/file_index": self._place.file,
            "dataset_from_index": first,
            "dataset_to_index": first + table.num_rows,
        }

    def _write_rows(self) -> None:
        path = self._place.path(self.partial, layout.DATA)
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(path, self._rows[0].schema, compression="snappy") as file:
            for table in self._rows:
                file.write_table(table)
        self._rows, self._row_bytes = [], 0

    def close(self) -> Path:
        """Finish all files and move the dataset to its place; returns it. On failure the partial directory
        goes.

        Raises SimForcingError if no episode was added or `out` has appeared meanwhile. Closing twice does
        nothing.
        """
        if self._closed:
            return self.out
        try:
            if not self._episodes:
                raise SimForcingError(f"{self.out}: no episodes were added; nothing is written")
            for track in self._tracks.values():
                track.close()
            self._write_rows()
            self._write_meta()
            if self.out.exists():
                raise SimForcingError(f"{self.out}: appeared while it was being written; choose another name")
            self.partial.rename(self.out)
        except BaseException:
            self.abort()
            raise
        self._closed = True
        return self.out

    def abort(self) -> None:
        """Give up: remove the partial directory."""
        self._closed = True
        for track in self._tracks.values():
            if track.file is not None:
                track.file.abort()
        shutil.rmtree(self.partial, ignore_errors=True)

    def _write_meta(self) -> None:
        path = Place().path(self.partial, layout.EPISODES)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(self._episodes), path, compression="snappy")
        pq.write_table(layout.tasks_table(list(self._tasks)), self.partial / layout.TASKS)
        stats = {key: track.summary.summary() for key, track in self._tracks.items()}
        stats |= {name: layout.vector_summary(np.concatenate(parts)) for name, parts in self._values.items()}
        stats |= self._index_stats()
        documents = {layout.INFO: self._info(), layout.STATS: stats}
        if self.meta:
            documents[layout.EXTRA] = self.meta
        for name, content in documents.items():
            text = json.dumps(content, indent=4, ensure_ascii=False, allow_nan=False)
            (self.partial / name).write_text(text + "\n", encoding="utf-8")

    def _index_stats(self) -> dict[str, dict[str, list[Any]]]:
        lengths = [row["length"] for row in self._episodes]
        parts = [
            self._index_columns(index, length, self._tasks[self._episodes[index]["tasks"][0]])
            for index, length in enumerate(lengths)
        ]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in layout.INDEX_FEATURES}
        columns["index"] = np.arange(self._frames)
        return {name: layout.vector_summary(column) for name, column in columns.items()}

    def _info(self) -> dict[str, Any]:
        features = {key: layout.video_feature(*size, self.fps) for key, size in self.cameras.items()}
        features |= {name: layout.vector_feature(names) for name, names in self.names.items()}
        features |= layout.index_features()
        return {
            "codebase_version": layout.VERSION,
            "robot_type": self.robot,
            "total_episodes": len(self._episodes),
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": layout.FILES_PER_CHUNK,
            "data_files_size_in_mb": self._limits["data"],
            "video_files_size_in_mb": self._limits["video"],
            "fps": int(self.fps) if float(self.fps).is_integer() else self.fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": layout.DATA,
            "video_path": layout.VIDEO,
            "features": features,
        }

    def __enter__(self) -> LeRobotWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
