"""From recorded numbers to a joint path: states or actions give end-effector targets, IK the joints.

Shapes: N frames, n arm joints, W numbers a row: xyz, rotation (rotation vector or Euler angles; a quaternion has one
number more), gripper (one number, or two fingers). Poses are 4x4 float64 matrices in the robot base frame, metres.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Float64
from scipy.spatial.transform import Rotation

from simforcing.data.actions import Convention, names, openings_of, targets, to_openings, to_poses, width
from simforcing.data.episode import ActionConvention, Dataset, Episode, StateConvention
from simforcing.data.episode import Rotation as Turn
from simforcing.errors import SimForcingError
from simforcing.twin.robot import IKResult, Robot

Follow = Literal["state", "action"]
_EULER = {"roll", "pitch", "yaw"}
_STILL = 0.05  # share of the gripper range that counts as its end


class UnreachableError(SimForcingError):
    """An episode has poses that the robot cannot take."""


@dataclass(frozen=True)
class Tolerance:
    """Largest miss of a pose that still counts as reached: metres and radians."""

    position: float = 0.01
    rotation: float = float(np.radians(5.0))

    def __post_init__(self) -> None:
        if not (0 < self.position < np.inf and 0 < self.rotation < np.inf):
            degrees = np.degrees(self.rotation)
            raise SimForcingError(f"largest miss {100 * self.position:g} cm, {degrees:g} degrees: give both above zero")


@dataclass(frozen=True)
class JointPath:
    """One episode as joints: `q`, gripper `opening` in [0, 1] (1 = open), and what the IK left over.

    Per frame: the miss of the pose, whether a joint is at its limit, and whether the solver converged.
    """

    q: Float64[np.ndarray, "N n"]
    opening: Float64[np.ndarray, " N"]
    position_error: Float64[np.ndarray, " N"]  # metres
    rotation_error: Float64[np.ndarray, " N"]  # radians
    at_limit: Bool[np.ndarray, " N"]
    converged: Bool[np.ndarray, " N"]

    @property
    def beyond_limits(self) -> Bool[np.ndarray, " N"]:
        """Frames whose pose asks for more than a joint limit gives: at a limit, and missed."""
        return np.asarray(self.at_limit & ~self.converged)

    def summary(self) -> dict[str, Any]:
        """Worst errors (mm, degrees), counts of frames at or beyond limits or not converged, largest joint step."""
        step = float(np.abs(np.diff(self.q, axis=0)).max()) if len(self.q) > 1 else 0.0
        return {
            "frames": len(self.q),
            "position_error_mm": round(1e3 * float(self.position_error.max()), 3),
            "rotation_error_degrees": round(float(np.degrees(self.rotation_error.max())), 3),
            "frames_at_limit": int(self.at_limit.sum()),
            "frames_beyond_limits": int(self.beyond_limits.sum()),
            "frames_not_converged": int((~self.converged).sum()),
            "joint_step": round(step, 4),
        }


def poses(rows: Float[np.ndarray, "N W"], rotation: Turn) -> Float64[np.ndarray, "N 4 4"]:
    """Pose matrices of rows xyz (metres), rotation (radians), gripper."""
    return to_poses(rows, StateConvention(rotation=rotation))


def openings(values: Float[np.ndarray, " N"], convention: Convention) -> Float64[np.ndarray, " N"]:
    """Gripper values as openings in [0, 1], 1 = open (clipped)."""
    return np.asarray(np.clip(to_openings(values, convention), 0.0, 1.0))


def _opening(rows: Float[np.ndarray, "N W"], state: StateConvention) -> Float64[np.ndarray, " N"]:
    return np.asarray(np.clip(openings_of(rows, state), 0.0, 1.0))


def action_targets(
    start: Float64[np.ndarray, "N 4 4"], action: Float[np.ndarray, "N W"], convention: ActionConvention
) -> Float64[np.ndarray, "N 4 4"]:
    """Pose at every frame by the actions: frame 0 as measured, frame i + 1 where action i leads.

    `start` are the measured poses (frame 0, and all of them for deltas relative to the state). The last
    action leads past the episode and is not used. Raises SimForcingError for absolute poses in the tool
    frame.
    """
    return np.concatenate([start[:1], targets(action, start, convention)[:-1]])


def state_convention(dataset: Dataset, convention: ActionConvention) -> StateConvention:
    """How states are stored: as the dataset says; else Euler angles where names say roll, pitch, yaw, and the rest as
    the actions have it.
    """
    if dataset.state_convention is not None:
        return dataset.state_convention
    euler = set(dataset.state_names) >= _EULER
    return StateConvention(
        rotation="euler_xyz" if euler else convention.rotation,
        gripper=convention.gripper,
        gripper_range=convention.gripper_range,
        position_unit=convention.position_unit,
        angle_unit=convention.angle_unit,
    )


def infer_gripper(dataset: Dataset, episodes: int = 20) -> Literal["open_positive", "closed_positive"] | None:
    """The sign of the gripper by the habit that episodes start with it open; None where they do not agree.

    Looks at the first states of up to `episodes` episodes, spread over the dataset, relative to the range that
    the dataset gives. None without states, too, and where states hold two fingers, which say nothing of actions.
    """
    if dataset.state_convention is not None and dataset.state_convention.fingers:
        return None
    low, high = (dataset.state_convention or dataset.action_convention).gripper_range
    picks = np.unique(np.linspace(0, len(dataset) - 1, min(episodes, len(dataset))).astype(int))
    rows = [dataset[int(i)].state[:1] for i in picks]
    first = np.array([float(row[0, -1]) for row in rows if row.size])
    if not first.size:
        return None
    part = (first - low) / (high - low)
    if np.mean(part > 1 - _STILL) > 0.7:
        return "open_positive"
    return "closed_positive" if np.mean(part < _STILL) > 0.7 else None


def commanded(
    episode: Episode,
    convention: ActionConvention,
    state: StateConvention,
    start: Float64[np.ndarray, "4 4"] | None = None,
) -> Float64[np.ndarray, "N 4 4"]:
    """Pose at every frame by the actions (`action_targets`), from the measured poses or, without any, from `start`.

    Raises SimForcingError for rows of another width, and where there is nothing to start from.
    """
    _check_width(episode, "action", convention)
    if episode.state.shape[-1] and start is None:
        _check_width(episode, "state", state)
        return action_targets(to_poses(episode.state, state), episode.action, convention)
    if start is None:
        raise SimForcingError(f"{episode.where}: it has no state; say where the arm starts with --start-pose")
    if convention.kind == "delta" and convention.relative_to == "state":
        convention = replace(convention, relative_to="target")  # the measured poses are not known: add changes up
    return action_targets(np.tile(start, (episode.length, 1, 1)), episode.action, convention)


def joint_path(
    robot: Robot,
    episode: Episode,
    convention: ActionConvention,
    *,
    state: StateConvention,
    follow: Follow = "state",
    start: Float64[np.ndarray, "4 4"] | None = None,
    offset: Float64[np.ndarray, "4 4"] | None = None,
    tolerance: Tolerance | None = None,
) -> JointPath:
    """The joint path that shows `episode`, one row a frame.

    follow: measured `state`, or the poses that the `action`s command (see `commanded`). start: pose at the first
    frame, for episodes without states. offset: pose, in the robot's end-effector frame, of the frame that the
    data report (default: the same). Raises UnreachableError, naming episode, frame and miss, for poses missed by
    more than `tolerance`, and SimForcingError for rows of another width.
    """
    limit = tolerance or Tolerance()
    if follow == "action":
        wanted = commanded(episode, convention, state, start)
        first = _opening(episode.state[:1], state) if episode.state.shape[-1] else np.ones(1)
        gripper = np.concatenate([first, openings(episode.action[:-1, -1], convention)])
    else:
        if not episode.state.shape[-1]:
            raise SimForcingError(f"{episode.where}: it has no state to follow; use --follow action --start-pose ...")
        _check_width(episode, "state", state)
        _check_width(episode, "action", convention)  # not used, but pairs say what it means
        wanted = to_poses(episode.state, state)
        gripper = _opening(episode.state, state)
    if offset is not None:
        wanted = wanted @ np.linalg.inv(offset)
    answer = robot.ik(wanted)
    missed = (answer.position_error > limit.position) | (answer.rotation_error > limit.rotation)
    if missed.any():
        raise _unreachable(robot, episode, answer, missed, limit)
    return JointPath(answer.q, gripper, answer.position_error, answer.rotation_error, answer.at_limit, answer.converged)


def _unreachable(
    robot: Robot, episode: Episode, answer: IKResult, missed: Bool[np.ndarray, " N"], limit: Tolerance
) -> UnreachableError:
    score = answer.position_error / limit.position + answer.rotation_error / limit.rotation
    worst = int(np.argmax(np.where(missed, score, -1.0)))
    return UnreachableError(
        f"{episode.where}, frame {worst}: {robot.name} misses the pose of '{robot.ee_name}' by "
        f"{100 * answer.position_error[worst]:.1f} cm "
        f"and {np.degrees(answer.rotation_error[worst]):.1f} degrees "
        f"({int(missed.sum())} of {len(missed)} frames are out of reach"
        f"{', a joint is at its limit' if answer.at_limit[worst] else ''}); "
        "check --robot, --ee and --rotation, or --skip-bad"
    )


def _check_width(episode: Episode, name: str, convention: Convention) -> None:
    rows = episode.state if name == "state" else episode.action
    wanted = width(convention)
    if rows.ndim != 2 or rows.shape[1] != wanted:
        raise SimForcingError(
            f"{episode.where}: {name} has {rows.shape[-1]} numbers a row; "
            f"replay needs {wanted} ({', '.join(names(convention))})"
        )


@dataclass(frozen=True)
class FrameMatch:
    """How well a frame of the robot explains reported poses: constant offset, and the worst rest."""

    name: str
    offset: Float64[np.ndarray, "4 4"]  # reported pose in this frame
    position_residual: float  # metres
    rotation_residual: float  # radians

    @property
    def size(self) -> float:
        """Length of the offset in metres plus its angle in radians; 0 where the frame itself is reported."""
        turn = Rotation.from_matrix(self.offset[:3, :3]).magnitude()
        return float(np.linalg.norm(self.offset[:3, 3]) + turn)


def match_frames(
    robot: Robot, joints: Float[np.ndarray, "N n"], reported: Float64[np.ndarray, "N 4 4"]
) -> Sequence[FrameMatch]:
    """Which body or site do reported poses belong to? Needs the recorded `joints`. Best first.

    Every frame gets its mean offset to the reported poses and the worst residual beyond it; frames that ride
    on the same link share the residual, so among equals (0.1 mm) the one with the smallest offset comes
    first.
    """
    table: dict[str, list[Float64[np.ndarray, "4 4"]]] = {}
    for q, pose in zip(np.asarray(joints, dtype=np.float64), reported, strict=True):
        for name, frame in robot.frame_poses(q).items():
            table.setdefault(name, []).append(np.linalg.solve(frame, pose))
    found = []
    for name, offsets in table.items():
        all_of_them = np.stack(offsets)
        mean = np.eye(4)
        mean[:3, 3] = all_of_them[:, :3, 3].mean(axis=0)
        turns = Rotation.from_matrix(all_of_them[:, :3, :3])
        mean[:3, :3] = turns.mean().as_matrix()
        rest = float(np.linalg.norm(all_of_them[:, :3, 3] - mean[:3, 3], axis=1).max())
        angle = float((turns * Rotation.from_matrix(mean[:3, :3]).inv()).magnitude().max())
        found.append(FrameMatch(name, mean, rest, angle))
    return sorted(found, key=lambda m: (round((m.position_residual + m.rotation_residual) / 1e-4), m.size))
