"""A dataset of real episodes -> a paired dataset: each frame of one camera beside its arm-only view.

Shapes: N frames, H W picture size. The joint paths of all episodes are found first, so that bad input ends
before anything is written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float64, UInt8
from PIL import Image

from simforcing.data import REAL, SIM, ActionConvention, Dataset, Episode, LeRobotWriter, open_dataset
from simforcing.data.episode import nearest
from simforcing.errors import SimForcingError
from simforcing.twin.camera import Camera, default_camera
from simforcing.twin.render import ArmRenderer
from simforcing.twin.replay import (
    Follow,
    JointPath,
    Tolerance,
    UnreachableError,
    infer_gripper,
    joint_path,
    state_rotation,
)
from simforcing.twin.robot import Robot

QA_FRAMES = 8
_TINT = np.array([255.0, 90.0, 20.0])  # the simulated arm over the real picture, in the third row of the QA sheet
_WRIST = ("wrist", "hand", "gripper", "tcp")

Report = Callable[[str, int, int], None]
"""Called with a stage (`replay`, `render`), the number of episodes done, and of all."""


@dataclass(frozen=True)
class Conventions:
    """What the dataset does not say itself; `auto` reads it from the dataset (see `resolve`)."""

    gripper: Literal["auto", "open_positive", "closed_positive"] = "auto"
    rotation: Literal["auto", "rotvec", "euler_xyz"] = "auto"

    def resolve(self, dataset: Dataset) -> tuple[ActionConvention, str, list[str]]:
        """The convention of actions, the rotation of states, and one line for each thing that was inferred.

        `auto` takes `meta/simforcing.json` where it is; else rotations are Euler angles where names say roll,
        pitch, yaw, and the gripper counts as open where episodes usually start.
        """
        convention, notes = dataset.action_convention, []
        if self.rotation != "auto":
            convention = replace(convention, rotation=self.rotation)
        if self.gripper != "auto":
            convention = replace(convention, gripper=self.gripper)
        elif "action" not in dataset.meta:
            found = infer_gripper(dataset)
            convention = replace(convention, gripper=found or convention.gripper)
            why = "most episodes start so when open" if found else "not clear from the data; assumed"
            notes.append(f"gripper: {convention.gripper} ({why}); --gripper says otherwise")
        rotation = self.rotation if self.rotation != "auto" else state_rotation(dataset, convention)
        return convention, rotation, notes


@dataclass(frozen=True)
class PairResult:
    """What `pair` made; `skipped` holds (episode, reason), `notes` what was inferred from the data."""

    out: Path
    episodes: int
    frames: int
    skipped: tuple[tuple[int, str], ...]
    worst_position: float  # metres
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Plan:
    episode: int
    path: JointPath


def choose_camera(dataset: Dataset, key: str | None = None) -> str:
    """The real camera: `key`, else the first that is no wrist camera.

    The part after `observation.images.` is enough. Raises SimForcingError for an unknown key and a dataset
    without pictures.
    """
    real = [name for name in dataset.cameras if name != SIM]
    if not real:
        raise SimForcingError(f"{dataset.root}: no camera in it; pairs need real pictures")
    if key is None:
        outside = [name for name in real if not any(word in name.lower() for word in _WRIST)]
        return (outside or real)[0]
    full = f"observation.images.{key.removeprefix('observation.images.')}"
    for name in (key, full):
        if name in real:
            return name
    raise SimForcingError(f"{dataset.root}: no camera {key!r}; {nearest(full, real)}")


def pair(
    dataset: Dataset | Path | str,
    out: Path | str,
    robot: Robot,
    *,
    camera: Camera | None = None,
    camera_key: str | None = None,
    follow: Follow = "state",
    conventions: Conventions | None = None,
    offset: Float64[np.ndarray, "4 4"] | None = None,
    tolerance: Tolerance | None = None,
    skip_bad: bool = False,
    episodes: Sequence[int] | None = None,
    qa_episodes: int = 3,
    report: Report | None = None,
) -> PairResult:
    """Write the paired LeRobot v3.0 dataset `out`: real frames of one camera, and the arm alone beside them.

    camera: where it stands (default: `default_camera`, a guess). camera_key: see `choose_camera`. follow,
    offset, tolerance: see `joint_path`. episodes: numbers to take (default all). qa_episodes: how many get a
    contact sheet in `qa/`. State, action and task are kept; camera, robot, conventions and errors go to
    `meta/simforcing.json`.

    Raises SimForcingError for an existing `out`, rows that are not 7 numbers, poses out of reach (unless
    `skip_bad`, which counts and lists them), a camera of another shape, and a machine without renderer. On
    any error and on interruption nothing is left at `out`.
    """
    data = dataset if isinstance(dataset, Dataset) else open_dataset(dataset)
    target = Path(out)
    if target.exists():
        raise SimForcingError(f"{target}: exists already; choose another output, or delete it first")
    tell = report or (lambda stage, done, total: None)
    key = choose_camera(data, camera_key)
    numbers = _numbers(data, episodes)
    height, width = data[numbers[0]].frames(key, [0]).shape[1:3]
    view = (camera or default_camera(robot, width, height)).resized(height, width)
    convention, rotation, notes = (conventions or Conventions()).resolve(data)
    find = partial(
        joint_path, robot, convention=convention, rotation=rotation, follow=follow, offset=offset, tolerance=tolerance
    )
    plans, skipped = _replay(data, numbers, find, skip_bad, tell)
    meta: dict[str, Any] = {
        "action": convention.to_dict(),
        "robot": {"name": robot.name, "sha256": robot.sha256, "end_effector": robot.ee_name},
        "camera": {"key": key, "source": "file" if camera else "default guess", **view.to_dict()},
        "source": {"dataset": data.root.name, "follow": follow, "state_rotation": rotation},
        "tool_offset": None if offset is None else offset.tolist(),
        **_outcome(plans, skipped),
    }
    with ArmRenderer(robot, view, height, width) as renderer:
        _write(data, target, key, plans, renderer, meta, qa_episodes, tell)
    worst = max(float(plan.path.position_error.max()) for plan in plans)
    frames = sum(len(plan.path.q) for plan in plans)
    return PairResult(target, len(plans), frames, tuple(skipped), worst, tuple(notes))


def _outcome(plans: Sequence[_Plan], skipped: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """What became of each source episode, for `meta/simforcing.json`."""
    return {
        "episodes": [{"source": plan.episode, **plan.path.summary()} for plan in plans],
        "skipped": [{"source": number, "reason": reason} for number, reason in skipped],
    }


def _write(
    data: Dataset,
    target: Path,
    key: str,
    plans: Sequence[_Plan],
    renderer: ArmRenderer,
    meta: dict[str, Any],
    qa_episodes: int,
    tell: Report,
) -> None:
    """Render and write every planned episode, and contact sheets of the first ones."""
    size = (renderer.camera.height, renderer.camera.width)
    writing = LeRobotWriter(
        target,
        fps=data.fps,
        robot=data.robot,
        cameras={REAL: size, SIM: size},
        state_names=data.state_names,
        action_names=data.action_names,
        meta=meta,
    )
    with writing as writer:
        for done, (episode, path) in enumerate((data[plan.episode], plan.path) for plan in plans):
            real = episode.frames(key)
            if real.shape[1:3] != size:
                here = f"{real.shape[1]}x{real.shape[2]}"
                raise SimForcingError(f"{episode.where}: {key} is {here}, others are {size[0]}x{size[1]}")
            sim = np.stack([renderer.picture(q, o) for q, o in zip(path.q, path.opening, strict=True)])
            writer.add_episode({REAL: real, SIM: sim}, episode.state, episode.action, episode.task)
            if done < qa_episodes:
                (writer.partial / "qa").mkdir(exist_ok=True)
                sheet = contact_sheet(real, sim, path, renderer)
                Image.fromarray(sheet).save(writer.partial / "qa" / f"episode_{done:06d}.png")
            tell("render", done + 1, len(plans))


def _numbers(data: Dataset, episodes: Sequence[int] | None) -> list[int]:
    numbers = list(range(len(data))) if episodes is None else list(episodes)
    for number in numbers:
        if not 0 <= number < len(data):
            raise SimForcingError(f"{data.root}: no episode {number}; it has 0 to {len(data) - 1}")
    if not numbers:
        raise SimForcingError(f"{data.root}: no episodes to pair")
    return numbers


def _replay(
    data: Dataset, numbers: Sequence[int], find: Callable[[Episode], JointPath], skip_bad: bool, tell: Report
) -> tuple[list[_Plan], list[tuple[int, str]]]:
    """Joint paths of all episodes, and those left out with the reason."""
    plans, skipped = [], []
    for done, number in enumerate(numbers):
        try:
            plans.append(_Plan(number, find(data[number])))
        except UnreachableError as error:
            if not skip_bad:
                raise
            skipped.append((number, str(error)))
        tell("replay", done + 1, len(numbers))
    if not plans:
        raise SimForcingError(f"{data.root}: all {len(skipped)} episodes are out of reach; the first: {skipped[0][1]}")
    return plans, skipped


def contact_sheet(
    real: UInt8[np.ndarray, "N H W 3"],
    sim: UInt8[np.ndarray, "N H W 3"],
    path: JointPath,
    renderer: ArmRenderer,
) -> UInt8[np.ndarray, "h w 3"]:
    """Eight frames of an episode: real, simulated, and the simulated arm tinted over the real picture."""
    picks = np.linspace(0, len(real) - 1, min(QA_FRAMES, len(real))).astype(int)
    masks = [renderer.mask(path.q[i], float(path.opening[i])) for i in picks]
    over = [_overlay(real[i], mask) for i, mask in zip(picks, masks, strict=True)]
    rows = [np.concatenate(list(row), axis=1) for row in (real[picks], sim[picks], over)]
    return np.concatenate(rows, axis=0)


def _overlay(picture: UInt8[np.ndarray, "H W 3"], mask: Bool[np.ndarray, "H W"]) -> UInt8[np.ndarray, "H W 3"]:
    mixed: Any = np.where(mask[..., None], 0.45 * picture + 0.55 * _TINT, picture)
    return np.asarray(mixed.astype(np.uint8))
