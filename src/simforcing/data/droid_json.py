"""Reads the `droid/` layout: one JSON of numbers an episode, and one video a camera.

`annotation/N.json` (or N.json beside `videos/`) holds `states` (xyz, roll pitch yaw, gripper) at the rate of the
videos, `texts`, `videos`, and the same trajectory at a higher rate under `observation.state.*` and `action.*`, of
which every k-th row belongs to a frame. Actions are absolute targets; gripper 1 = closed.

Shapes: N frames of an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from simforcing.data.episode import ActionConvention, StateConvention
from simforcing.data.lerobot_tables import read_json
from simforcing.data.problems import Problems
from simforcing.data.source import Rows, Source, Survey, VideoFootage
from simforcing.data.video import VideoFile
from simforcing.errors import SimForcingError

NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
FPS = 5.0
"""Rate of the layout's videos; its numbers do not say."""

_ACTION = ("action.cartesian_position", "action.gripper_position")
_STATE = ("observation.state.cartesian_position", "observation.state.gripper_position")


def annotation_files(root: Path) -> list[Path]:
    """The episode files in the order of their numbers: under `annotation/`, else beside `videos/`."""
    folder = root / "annotation"
    paths = folder.rglob("*.json") if folder.is_dir() else root.glob("*.json") if (root / "videos").is_dir() else []
    return sorted(
        paths,
        key=lambda path: (
            path.parent,
            not path.stem.isdigit(),
            int(path.stem) if path.stem.isdigit() else 0,
            path.stem,
        ),
    )


def is_droid_json(root: Path) -> bool:
    """Whether a directory has this layout: the first JSON file that can be read has `states` or `videos`."""
    for path in annotation_files(root):
        try:
            return bool({"states", "videos"} & set(read_json(path)))
        except SimForcingError:
            continue
    return False


def survey_droid_json(root: Path, problems: Problems) -> Survey:
    """Reads every annotation's names and lengths; numbers are read again when asked for."""
    sources, cameras, splits = [], set[str](), dict[str, list[int]]()
    for index, path in enumerate(annotation_files(root)):
        source = _source(root, index, path, problems)
        cameras |= set(source.footage)
        sources.append(source)
        if path.parent.name not in ("annotation", root.name):
            splits.setdefault(path.parent.name, []).append(index)
    for source in sources:
        for key in sorted(cameras - set(source.footage)):
            message = f"{source.where}: no video {key} in {source.file}, which others have; leave it out or --skip-bad"
            problems.error("missing_video", message, episode=source.index, file=source.file)
    return Survey(
        root=root,
        format="DROID JSON",
        fps=FPS,
        robot="franka",
        cameras=tuple(sorted(cameras)),
        convention=ActionConvention("absolute", None, "base", "euler_xyz", "closed_positive", (0.0, 1.0), FPS),
        state_convention=StateConvention("euler_xyz", "closed_positive", (0.0, 1.0)),
        sources=sources,
        state_names=NAMES,
        action_names=NAMES,
        splits=splits,
    )


def _source(root: Path, index: int, path: Path, problems: Problems) -> Source:
    where = f"episode {index} of {root} ({path.name})"
    try:
        content = read_json(path)
    except SimForcingError as error:
        problems.error("unreadable_table", f"{where}: {error}", episode=index, file=path)
        content = {}
    footage = {}
    for number, entry in enumerate(content.get("videos") or []):
        given = entry.get("video_path", "") if isinstance(entry, dict) else str(entry)
        file = VideoFile(_find_video(root, path, number, given), None)
        file.report(problems, index)
        footage[f"observation.images.camera_{number}"] = VideoFootage(file)
    states = content.get("states")
    length = len(states) if isinstance(states, list) else None
    for key, count in (("state_length", length), ("video_length", length), ("raw_length", _raw_length(content))):
        if key in content and count is not None and content[key] != count:
            message = f"{where}: {key} is {content[key]}, found {count}"
            problems.warn("contradicting_metadata", message, episode=index, file=path)
    texts = content.get("texts") or [""]
    task = str(texts[0]).strip()
    return Source(index, where, path, length, task, footage, partial(_Reader(path, where, index).load), path.stem)


def _raw_length(content: dict[str, Any]) -> int | None:
    rows = content.get(_STATE[0])
    return len(rows) if isinstance(rows, list) else None


def _find_video(root: Path, annotation: Path, number: int, given: str) -> Path:
    """Where a video is: as given, or without the name of the split, or by the episode's number; else as given."""
    parts = Path(given).parts
    tries = [root.joinpath(*parts)] if parts and not Path(given).is_absolute() else []
    if len(parts) > 2:
        tries.append(root.joinpath(parts[0], *parts[2:]))
    tries.append(root / "videos" / annotation.stem / (parts[-1] if parts else f"{number}.mp4"))
    return next((path for path in tries if path.is_file()), tries[-1])


@dataclass(frozen=True)
class _Reader:
    path: Path
    where: str
    index: int

    def load(self, problems: Problems) -> Rows:
        """States, and of the faster rows those that belong to a frame."""
        content = read_json(self.path)
        state = self._array(content, ("states",), problems)
        action = self._array(content, _ACTION, problems)
        raw = self._array(content, _STATE, problems)
        if state is not None and action is not None and len(state):
            step = max(round(len(action) / len(state)), 1)
            if raw is not None and len(raw) != len(action):
                message = (
                    f"{self.where}: {len(raw)} fast states but {len(action)} fast actions in {self.path}; re-export"
                )
                problems.error("length_mismatch", message, episode=self.index, file=self.path)
            elif raw is not None and not _equal(raw[::step], state):
                message = f"{self.where}: states are not every {step}. row of {_STATE[0]} in {self.path}"
                problems.warn("contradicting_metadata", message, episode=self.index, file=self.path)
            action = action[::step]
        texts = content.get("texts") or [""]
        return Rows(state=state, action=action, tasks=(str(texts[0]).strip(),))

    def _array(
        self, content: dict[str, Any], names: Sequence[str], problems: Problems
    ) -> Float32[np.ndarray, "N D"] | None:
        if any(not content.get(name) for name in names):
            return None
        try:
            parts = [np.asarray(content[name], np.float32) for name in names]
            return np.concatenate([part if part.ndim == 2 else part.reshape(-1, 1) for part in parts], axis=1)
        except (ValueError, TypeError) as error:
            message = f"{self.where}: {' and '.join(names)} are no rows of numbers ({error}); repair {self.path}"
            problems.error("unreadable_table", message, episode=self.index, file=self.path)
            return None


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    return first.shape == second.shape and bool(np.allclose(first, second, atol=1e-4, equal_nan=True))
