"""Facts of the LeRobot v3.0 layout that the reader and the writer share: paths, features, statistics.

Shapes: N rows of one feature, D its width, H W picture size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int64, UInt8

VERSION = "v3.0"
INFO = "meta/info.json"
STATS = "meta/stats.json"
TASKS = "meta/tasks.parquet"
EXTRA = "meta/simforcing.json"
EPISODES_DIR = "meta/episodes"
EPISODES_V2 = "meta/episodes.jsonl"
TASKS_V2 = "meta/tasks.jsonl"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"

STATE = "observation.state"
ACTION = "action"

FILES_PER_CHUNK = 1000
DATA_FILE_MB = 100
VIDEO_FILE_MB = 200

INDEX_FEATURES: dict[str, str] = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""Columns that every data file ends with, in this order."""

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


@dataclass(frozen=True)
class Place:
    """Number of a file within the dataset; 1000 files make a chunk."""

    chunk: int = 0
    file: int = 0

    def next(self) -> Place:
        """The place after this one."""
        return Place(self.chunk + 1, 0) if self.file == FILES_PER_CHUNK - 1 else Place(self.chunk, self.file + 1)

    def path(self, root: Path, template: str, **names: str) -> Path:
        """Fill a path template."""
        return root / template.format(chunk_index=self.chunk, file_index=self.file, **names)


def video_feature(height: int, width: int, fps: float) -> dict[str, Any]:
    """Entry of a camera under `features` in info.json."""
    details = {
        "video.fps": float(fps),
        "video.height": height,
        "video.width": width,
        "video.channels": 3,
        "video.codec": "h264",
        "video.pix_fmt": "yuv420p",
        "video.is_depth_map": False,
        "has_audio": False,
    }
    names = ["height", "width", "channels"]
    return {"dtype": "video", "shape": [height, width, 3], "names": names, "info": details}


def vector_feature(names: Sequence[str]) -> dict[str, Any]:
    """Entry of a float32 vector under `features` in info.json."""
    return {"dtype": "float32", "shape": [len(names)], "names": list(names)}


def index_features() -> dict[str, Any]:
    """Entries of the columns that every dataset has."""
    return {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in INDEX_FEATURES.items()}


def vector_type(width: int) -> pa.DataType:
    """Parquet type of a float32 vector; a vector of one number is stored as a plain number."""
    return pa.float32() if width == 1 else pa.list_(pa.field("element", pa.float32()), width)


def tasks_table(tasks: Sequence[str]) -> pa.Table:
    """`meta/tasks.parquet`: the task string is the (pandas) index, `task_index` the only column."""

    def column(name: str, kind: str, stored: str) -> dict[str, Any]:
        return {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": stored, "metadata": None}

    header = {
        "index_columns": ["task"],
        "column_indexes": [
            {
                "name": None,
                "field_name": None,
                "pandas_type": "unicode",
                "numpy_type": "object",
                "metadata": {"encoding": "UTF-8"},
            }
        ],
        "columns": [column("task_index", "int64", "int64"), column("task", "unicode", "object")],
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.3.3",
    }
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(header)})


def vector_summary(rows: np.ndarray) -> dict[str, list[Any]]:
    """min, max, mean, std, count and quantiles of rows [N] or [N, D], each a list of D numbers (count: of
    one).
    """
    flat = rows.reshape(len(rows), -1)
    wide = flat.astype(np.float64)
    summary: dict[str, list[Any]] = {
        "min": flat.min(axis=0).tolist(),
        "max": flat.max(axis=0).tolist(),
        "mean": wide.mean(axis=0).tolist(),
        "std": wide.std(axis=0).tolist(),
        "count": [len(flat)],
    }
    for name, value in zip(QUANTILES, np.quantile(wide, list(QUANTILES.values()), axis=0), strict=True):
        summary[name] = value.tolist()
    return summary


@dataclass
class PictureSummary:
    """Statistics of a camera from a histogram of its pixel values: exact, and of constant size."""

    counts: Int64[np.ndarray, "3 256"] = field(default_factory=lambda: np.zeros((3, 256), np.int64))
    frames: int = 0

    def add(self, frames: UInt8[np.ndarray, "N H W 3"]) -> None:
        """Count the pixels of more frames."""
        for frame in frames:
            for channel in range(3):
                self.counts[channel] += np.bincount(frame[..., channel].ravel(), minlength=256)
        self.frames += len(frames)

    def merge(self, other: PictureSummary) -> None:
        """Add another summary's pixels."""
        self.counts += other.counts
        self.frames += other.frames

    def summary(self) -> dict[str, list[Any]]:
        """As `vector_summary`, of values in [0, 1], shaped [3, 1, 1]; `count` is the number of frames."""
        values = np.arange(256) / 255.0
        total = self.counts.sum(axis=1)
        mean = self.counts @ values / total
        spread = np.sqrt(np.maximum(self.counts @ values**2 / total - mean**2, 0))
        cumulative = self.counts.cumsum(axis=1)

        def at(level: int) -> float:
            return float(values[level])

        def per_channel(numbers: Sequence[float]) -> list[Any]:
            return [[[float(number)]] for number in numbers]

        present = [np.flatnonzero(row) for row in self.counts]
        result: dict[str, list[Any]] = {
            "min": per_channel([at(row[0]) for row in present]),
            "max": per_channel([at(row[-1]) for row in present]),
            "mean": per_channel(mean),
            "std": per_channel(spread),
            "count": [self.frames],
        }
        for name, share in QUANTILES.items():
            levels = [int(np.searchsorted(row, share * pixels)) for row, pixels in zip(cumulative, total, strict=True)]
            result[name] = per_channel([at(level) for level in levels])
        return result


def episode_stats_columns(stats: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Per-episode statistics under the column names of the episodes table."""
    return {f"stats/{feature}/{name}": value for feature, entry in stats.items() for name, value in entry.items()}
