"""A dataset's camera from its own videos: reads episodes, fits (`camera_fit.py`), writes what was found.

Beside `camera.json` lie `camera.report.json`, with the errors in held-out frames, and `camera.overlays/`, one picture
an episode. Shapes: T frames, n arm joints, S state width, H W picture size.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, UInt8
from PIL import Image

from simforcing.data import Dataset, Episode, open_dataset
from simforcing.errors import SimForcingError
from simforcing.files import check_new, partial_path, write_text
from simforcing.twin.camera import Camera
from simforcing.twin.camera_fit import Calibration, Effort, Report, Track, fit_camera
from simforcing.twin.pairs import Conventions, choose_camera, stored_camera
from simforcing.twin.render import ArmRenderer
from simforcing.twin.replay import Tolerance, joint_path
from simforcing.twin.robot import Robot

MOST_EPISODES = 12  # of a dataset, spread over it, when one camera is fitted and none are named
_OVERLAY_FRAMES = 6
_SHARED_FRAMES, _LEAST_FRAMES = 160, 24  # decoded of all episodes together, and of each
_LIMIT_SLACK = 0.1  # radians or metres that a measured joint may be beyond its limit
_TINT, _LINE = np.array([255.0, 90.0, 20.0]), np.array([255.0, 60.0, 0.0])
_LEAST_WANDER = 0.03  # picture widths
_RESTARTS = 2
_LEAST_OVERLAP = 0.2  # of motion in held-out frames; below it a camera is doubtful


@dataclass(frozen=True)
class Source:
    """What to read of a dataset, and how. offset: see `replay.joint_path`; episodes: their numbers."""

    camera_key: str | None = None
    episodes: Sequence[int] | None = None
    conventions: Conventions = Conventions()
    offset: Float64[np.ndarray, "4 4"] | None = None
    tolerance: Tolerance | None = None


@dataclass(frozen=True)
class Result:
    """One camera that was fitted: its file, the episodes behind it, how good it is, and the score of every search."""

    path: Path
    episodes: tuple[int, ...]
    found: Calibration
    scores: tuple[float, ...]

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons to look at the overlays with care; () without any."""
        found, out = self.found, []
        if found.held_out.overlap < _LEAST_OVERLAP:
            out.append("it explains little of what moves")
        if found.held_out.overlap < found.guess_held_out.overlap or found.score <= found.guess_score:
            out.append("the default guess is no worse")
        if found.ambiguous:
            out.append("another camera explains the motion nearly as well")
        if found.wander > _LEAST_WANDER * found.camera.width:
            out.append(f"the camera moves by {found.wander:.0f} pixels between episodes, see --per-episode")
        return tuple(out)


@dataclass(frozen=True)
class Results:
    """What `calibrate` made; `skipped` holds (episode, reason), `notes` what was inferred from the data."""

    cameras: tuple[Result, ...]
    skipped: tuple[tuple[int, str], ...]
    notes: tuple[str, ...]


def calibrate(
    dataset: Dataset | Path | str,
    out: Path | str,
    robot: Robot,
    source: Source = Source(),
    *,
    per_episode: bool = False,
    fovy: float | None = None,
    effort: Effort | None = None,
    seed: int = 0,
    restarts: int | None = None,
    report: Report | None = None,
) -> Results:
    """Fit the camera of a dataset and write it to `out` (such as `camera.json`), with report and overlays beside it.

    One camera for all episodes together or, `per_episode`, one for each: `camera_000003.json` and so on; then
    episodes without motion or out of reach are left out and listed. fovy (degrees) fixes the field of view.
    The whole search runs `restarts` times, from seeds `seed`, `seed` + 1, ... (default twice; once with an `effort`
    of your own), and the camera that explains the fitted frames best is kept: where little moves, one search may miss.

    Raises SimForcingError for files that exist, an unknown camera (listing those there are), states out of
    the robot's reach, nothing that moves, and a machine without renderer.
    """
    data = dataset if isinstance(dataset, Dataset) else open_dataset(dataset)
    times = restarts if restarts is not None else _RESTARTS if effort is None else 1
    _check(times, fovy)
    target, tell = Path(out), report or (lambda stage, share, words: None)
    numbers = _numbers(data, source.episodes, None if per_episode else MOST_EPISODES)
    files = [target.with_stem(f"{target.stem}_{n:06d}") for n in numbers] if per_episode else [target]
    report_file, pictures = target.with_suffix(".report.json"), target.with_suffix(".overlays")
    for path in (*files, report_file, pictures):
        check_new(path, data.root)
    reader = _Reader(data, robot, source)
    target.parent.mkdir(parents=True, exist_ok=True)
    drawn = partial_path(pictures)
    made: list[Result] = []
    skipped: list[tuple[int, str]] = []
    groups = [[n] for n in numbers] if per_episode else [numbers]
    try:
        drawn.mkdir()
        for i, (path, group) in enumerate(zip(files, groups, strict=True)):
            name = f"episode {group[0]}: " if per_episode else ""
            parts = [_part(tell, i * times + k, len(groups) * times, name) for k in range(times)]
            try:
                tracks = [reader.track(n, _SHARED_FRAMES // len(group)) for n in group]
                fits = [
                    fit_camera(robot, tracks, fovy=fovy, effort=effort, seed=seed + k, report=part)
                    for k, part in enumerate(parts)
                ]
            except SimForcingError as error:
                if not per_episode:
                    raise
                skipped.append((group[0], str(error)))
                continue
            found = max(fits, key=lambda fit: fit.score)
            made.append(Result(path, tuple(group), found, tuple(fit.score for fit in fits)))
            _draw_overlays(drawn, robot, found.camera, group, tracks)
        if not made:
            raise SimForcingError(f"{data.root}: no episode could be calibrated; the first: {skipped[0][1]}")
        os.replace(drawn, pictures)
    except BaseException:
        shutil.rmtree(drawn, ignore_errors=True)
        raise
    for result in made:
        result.found.camera.save(result.path)
    results = Results(tuple(made), tuple(skipped), reader.notes)
    write_text(report_file, json.dumps(_summary(results, data, robot, reader.key, seed, fovy), indent=2) + "\n")
    return results


def _check(times: int, fovy: float | None) -> None:
    if times < 1:
        raise SimForcingError(f"{times} searches: at least one is needed")
    if fovy is not None and not 1.0 <= fovy <= 170.0:
        raise SimForcingError(f"field of view {fovy:g} degrees: give 1 to 170")


def _part(tell: Report, done: int, count: int, name: str) -> Report:
    """Progress of one of `count` searches as part of all; a single one as it is."""
    if count == 1:
        return tell

    def report(stage: str, share: float, words: str) -> None:
        tell("calibrate", done / count, f"{name}{stage}")

    return report


def _numbers(data: Dataset, episodes: Sequence[int] | None, most: int | None) -> list[int]:
    if not len(data):
        raise SimForcingError(f"{data.root}: no episodes to calibrate with")
    if episodes is None:
        count = len(data) if most is None else min(most, len(data))
        return [int(i) for i in np.unique(np.linspace(0, len(data) - 1, count).round())]
    for number in episodes:
        if not 0 <= number < len(data):
            raise SimForcingError(f"{data.root}: no episode {number}; it has 0 to {len(data) - 1}")
    return list(dict.fromkeys(episodes))


class _Reader:
    """Episodes as joints and pictures."""

    def __init__(self, data: Dataset, robot: Robot, source: Source) -> None:
        try:
            self.key = choose_camera(data, source.camera_key)
        except SimForcingError as error:
            listed = ", ".join(name.removeprefix("observation.images.") for name in data.cameras)
            if not listed:
                raise
            raise SimForcingError(f"{data.root}: no camera {source.camera_key!r}; it has {listed}") from error
        known = stored_camera(data, self.key)
        if known is not None and known.mirrored:
            raise SimForcingError(
                f"{data.root}: pictures of {self.key} are mirrored, and it says where the camera stands"
            )
        self._data, self._robot, self._source = data, robot, source
        self._action, self._state, notes = source.conventions.resolve(data)
        self._joints = _joint_columns(data.state_names, robot)
        self.notes = tuple(notes) if self._joints is None else ("states are joint positions",)

    def track(self, number: int, frames: int) -> Track:
        """Joints and pictures of at most about `frames` frames of an episode, spread evenly.

        Raises SimForcingError for poses or joints out of reach.
        """
        episode = self._data[number]
        q, opening = self._joints_of(episode)
        count = min(episode.length, max(frames, _LEAST_FRAMES))
        rows = np.unique(np.linspace(0, episode.length - 1, count).round().astype(int))
        return Track(episode.where, q[rows], opening[rows], episode.frames(self.key, rows.tolist()))

    def _joints_of(self, episode: Episode) -> tuple[Float64[np.ndarray, "T n"], Float64[np.ndarray, " T"]]:
        if self._joints is None:
            source = self._source
            path = joint_path(
                self._robot, episode, self._action, state=self._state, offset=source.offset, tolerance=source.tolerance
            )
            return path.q, path.opening
        q = episode.state[:, self._joints].astype(np.float64)
        self._check_limits(q, episode)
        return q, self._opening(episode)

    def _check_limits(self, q: Float64[np.ndarray, "T n"], episode: Episode) -> None:
        beyond = np.maximum(self._robot.limits[:, 0] - q, q - self._robot.limits[:, 1])
        frame, joint = np.unravel_index(int(beyond.argmax()), beyond.shape)
        if beyond[frame, joint] > _LIMIT_SLACK:
            name = self._robot.joint_names[int(joint)]
            raise SimForcingError(
                f"{episode.where}, frame {frame}: joint '{name}' of {self._robot.name} cannot be at "
                f"{q[frame, joint]:.2f}; check --robot, and that states are radians"
            )

    def _opening(self, episode: Episode) -> Float64[np.ndarray, " T"]:
        """Gripper opening beside joint states: the column that is named so, by the state's range; else open."""
        columns = [i for i, name in enumerate(self._data.state_names) if "gripper" in name.lower()]
        if len(columns) != 1:
            return np.ones(episode.length)
        low, high = self._state.gripper_range
        part = np.clip((episode.state[:, columns[0]].astype(np.float64) - low) / (high - low), 0.0, 1.0)
        return np.asarray(part if self._state.gripper == "open_positive" else 1.0 - part)


def _joint_columns(names: Sequence[str], robot: Robot) -> list[int] | None:
    """Columns of the state that are the arm's joints by their names; None where states are poses."""
    if set(robot.joint_names) <= set(names):
        return [names.index(name) for name in robot.joint_names]
    called = [i for i, name in enumerate(names) if "joint" in name.lower() and "gripper" not in name.lower()]
    return called if len(called) == len(robot.joint_names) else None


def _draw_overlays(folder: Path, robot: Robot, camera: Camera, numbers: Sequence[int], tracks: Sequence[Track]) -> None:
    folder.mkdir(exist_ok=True)
    with ArmRenderer(robot, camera, camera.height, camera.width) as renderer:
        for number, track in zip(numbers, tracks, strict=True):
            Image.fromarray(overlay(renderer, track)).save(folder / f"episode_{number:06d}.png")


def overlay(renderer: ArmRenderer, track: Track) -> UInt8[np.ndarray, "h w 3"]:
    """Six frames of an episode side by side; below them the same with the robot's outline drawn on them."""
    picks = np.unique(np.linspace(0, len(track.q) - 1, _OVERLAY_FRAMES).astype(int))
    marked = []
    for i in picks:
        mask = renderer.mask(track.q[i], float(track.opening[i]))
        inner = mask.copy()
        for axis in (0, 1):
            for shift in (-1, 1):
                inner &= np.roll(mask, shift, axis)
        picture = track.frames[i].astype(np.float64)
        picture[mask] = 0.8 * picture[mask] + 0.2 * _TINT
        picture[mask & ~inner] = _LINE
        marked.append(picture.astype(np.uint8))
    return np.concatenate([np.concatenate(list(track.frames[picks]), axis=1), np.concatenate(marked, axis=1)])


def _summary(results: Results, data: Dataset, robot: Robot, key: str, seed: int, fovy: float | None) -> dict[str, Any]:
    """Content of the report file."""
    return {
        "dataset": data.root.name,
        "camera_key": key,
        "robot": {"name": robot.name, "sha256": robot.sha256},
        "seed": seed,
        "fovy_fixed": fovy is not None,
        "cameras": [
            {
                "file": result.path.name,
                "episodes": list(result.episodes),
                **result.found.to_dict(),
                "scores_of_searches": [round(score, 5) for score in result.scores],
                "doubts": list(result.doubts),
            }
            for result in results.cameras
        ],
        "skipped": [{"episode": number, "reason": reason} for number, reason in results.skipped],
    }
