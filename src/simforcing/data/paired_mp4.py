"""Reads the layout of the authors' release: rows in npz files, and videos with the simulation left of the real picture.

`meta/episodes.jsonl` has one line an episode (`episode_index`, `num_steps`, `instruction`, `video_path`), rows are in
`data/episode_<n>.npz` (`action`, `state`, 7 numbers each), the video is where its line says or `videos/<n>.mp4`. It
is read as two cameras. A video may be shorter than the rows, or longer: the shorter counts. Actions are deltas in the
base frame with rotation vectors, gripper 1 = open, -1 = closed; 5 Hz. Source: method.md of the released loader,
"Data".

Shapes: N rows of an episode, D width.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from simforcing.data.episode import REAL, SIM, ActionConvention, StateConvention
from simforcing.data.lerobot_tables import read_json_lines
from simforcing.data.problems import Problems
from simforcing.data.source import Rows, Source, Survey, VideoFootage
from simforcing.data.video import VideoFile
from simforcing.errors import SimForcingError

NAMES = ("x", "y", "z", "rx", "ry", "rz", "gripper")
STATE_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
FPS = 5.0
EPISODES = "meta/episodes.jsonl"


def is_paired_mp4(root: Path) -> bool:
    """Whether a directory has this layout: `meta/episodes.jsonl` without LeRobot's `meta/info.json`."""
    return (root / EPISODES).is_file() and not (root / "meta" / "info.json").exists()


def survey_paired_mp4(root: Path, problems: Problems) -> Survey:
    """Reads the list of episodes and the headers of their videos."""
    entries = read_json_lines(root / EPISODES)
    if not entries:
        raise SimForcingError(f"{root / EPISODES}: no episodes in it; prepare the dataset again")
    numbers = [entry.get("episode_index") for entry in entries]
    for number in sorted({n for n in numbers if isinstance(n, int) and numbers.count(n) > 1}):
        message = f"{root / EPISODES}: episode {number} is there twice; prepare the dataset again"
        problems.error("contradicting_metadata", message, file=root / EPISODES)
    return Survey(
        root=root,
        format="paired MP4 [sim|real]",
        fps=FPS,
        robot="widowx",
        cameras=(REAL, SIM),
        convention=ActionConvention("delta", "state", "base", "rotvec", "open_positive", (-1.0, 1.0), FPS),
        state_convention=StateConvention("euler_xyz", "open_positive", (0.0, 1.0)),
        sources=[_source(root, index, entry, problems) for index, entry in enumerate(entries)],
        state_names=STATE_NAMES,
        action_names=NAMES,
    )


def _source(root: Path, index: int, entry: Mapping[str, Any], problems: Problems) -> Source:
    number = entry.get("episode_index", index)
    where = f"episode {index} of {root} (number {number})"
    table = root / "data" / f"episode_{number}.npz"
    given = Path(str(entry.get("video_path") or ""))
    tries = [root / given, root / "videos" / f"{number}.mp4", root / "videos" / given.name]
    path = next((path for path in tries if path.is_file()), tries[1])
    if not table.is_file():
        message = f"{where}: {table} is missing; download or restore it"
        problems.error("missing_table", message, episode=index, file=table)
    file = VideoFile(path, None)
    file.report(problems, index)
    stated = entry.get("num_steps")
    length = _usable(file, stated if isinstance(stated, int) else None, where, index, problems)
    footage = {
        REAL: VideoFootage(file, stated=length, half="right"),
        SIM: VideoFootage(file, stated=length, half="left"),
    }
    reader = _Reader(table, where, index, stated if isinstance(stated, int) else None, length)
    task = str(entry.get("instruction") or "").strip()
    return Source(index, where, table, length, task, footage, partial(reader.load), f"number {number}")


def _usable(file: VideoFile, stated: int | None, where: str, index: int, problems: Problems) -> int | None:
    """Rows that have a picture: the least of those recorded and the video's frames; a difference is a warning."""
    try:
        frames = file.probe().frames
    except SimForcingError as error:
        if file.fault() is None:
            problems.error("undecodable_video", f"{where}: {error}", episode=index, file=file.path)
        return stated
    if stated is None or frames in (0, stated):
        return stated or frames or None
    message = f"{where}: {stated} steps but {frames} frames in {file.path}; {min(frames, stated)} are used"
    problems.warn("length_mismatch", message, episode=index, file=file.path)
    return min(frames, stated)


@dataclass(frozen=True)
class _Reader:
    table: Path
    where: str
    index: int
    stated: int | None
    length: int | None

    def load(self, problems: Problems) -> Rows:
        """Rows of the npz, cut to those that have a picture."""
        arrays = read_npz(self.table)
        found: dict[str, Float32[np.ndarray, "N D"] | None] = {}
        for name in ("state", "action"):
            values = arrays.get(name)
            if values is None or values.ndim != 2:
                found[name] = None
                continue
            if self.stated is not None and len(values) != self.stated:
                message = (
                    f"{self.where}: num_steps is {self.stated} but {name} has {len(values)} rows in {self.table}; "
                    "prepare the dataset again"
                )
                problems.error("length_mismatch", message, episode=self.index, file=self.table)
            found[name] = values[: self.length].astype(np.float32)
        return Rows(state=found["state"], action=found["action"])


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an npz, without unpickling. Raises SimForcingError if it is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        raise SimForcingError(f"{path}: file is missing; download or restore it") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise SimForcingError(f"{path}: cannot be read as npz ({error}); restore it") from error
