"""Reads the `bridge/` layout: N.npz with `arr_0` beside N.mp4.

A row is 35 times the change of position in metres, 5.6 times the change of rotation in radians (Euler angles, base
frame), the gripper (1 = closed, -1 = open) and three zeros. Row i leads frame i to frame i + 1, as `delta` relative
to the state, which is not recorded. There is no instruction. The container's rate is not the data's, which is 5 Hz.

Shapes: N rows of an episode.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from simforcing.data.episode import ActionConvention
from simforcing.data.paired_mp4 import read_npz
from simforcing.data.problems import Problems
from simforcing.data.source import Rows, Source, Survey, VideoFootage
from simforcing.data.video import VideoFile
from simforcing.errors import SimForcingError

FPS = 5.0
POSITION, ROTATION = 35.0, 5.6
"""Factors by which changes in metres and radians were multiplied when the layout was made."""

NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
CAMERA = "observation.images.real"
WIDTH = 10


def is_bridge_npz(root: Path) -> bool:
    """Whether a directory has npz files with videos of the same names beside them."""
    return any(path.with_suffix(".mp4").exists() for path in root.glob("*.npz"))


def survey_bridge_npz(root: Path, problems: Problems) -> Survey:
    """Lists the episodes by name: every stem that has an npz or an mp4."""
    stems = sorted({path.stem for pattern in ("*.npz", "*.mp4") for path in root.glob(pattern)})
    return Survey(
        root=root,
        format="Bridge npz + mp4",
        fps=FPS,
        robot="widowx",
        cameras=(CAMERA,),
        convention=ActionConvention("delta", "state", "base", "euler_xyz", "closed_positive", (-1.0, 1.0), FPS),
        sources=[_source(root, index, stem, problems) for index, stem in enumerate(stems)],
        action_names=NAMES,
    )


def _source(root: Path, index: int, stem: str, problems: Problems) -> Source:
    where = f"episode {index} of {root} ({stem})"
    table = root / f"{stem}.npz"
    if not table.is_file():
        message = f"{where}: {table} is missing; download or restore it"
        problems.error("missing_table", message, episode=index, file=table)
    file = VideoFile(root / f"{stem}.mp4", None)
    file.report(problems, index)
    length = _length(table)
    return Source(
        index, where, table, length, "", {CAMERA: VideoFootage(file)}, partial(_Reader(table, where, index).load), stem
    )


def _length(table: Path) -> int | None:
    """Rows of the table; None where it cannot be read, which `load` says."""
    try:
        rows = read_npz(table).get("arr_0")
    except SimForcingError:
        return None
    return len(rows) if rows is not None and rows.ndim else None


@dataclass(frozen=True)
class _Reader:
    table: Path
    where: str
    index: int

    def load(self, problems: Problems) -> Rows:
        """Actions in metres and radians; no state ([N, 0])."""
        arrays = read_npz(self.table)
        rows = arrays.get("arr_0")
        if rows is None or rows.ndim != 2 or rows.shape[1] < 7:
            there = {name: list(values.shape) for name, values in arrays.items()}
            message = f"{self.where}: no arr_0 of [N, {WIDTH}] in {self.table} (there are: {there}); restore it"
            problems.error("missing_column", message, episode=self.index, file=self.table)
            return Rows()
        if rows.shape[1] > 7 and np.any(rows[:, 7:] != 0):
            message = f"{self.where}: columns 7 to {rows.shape[1] - 1} of arr_0 are not zero and are not read"
            problems.warn("contradicting_metadata", message, episode=self.index, file=self.table)
        action = rows[:, :7] / np.array([POSITION] * 3 + [ROTATION] * 3 + [1.0])
        return Rows(state=np.empty((len(rows), 0), np.float32), action=action.astype(np.float32))
