"""From recorded numbers to a joint path: states or actions give end-effector targets, IK the joints.

Shapes: N frames, n arm joints. Rows of states and actions are 7 numbers: xyz in metres, rotation in radians
(rotation vector or Euler angles), gripper. Poses are 4x4 float64 matrices in the robot base frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Float64
from scipy.spatial.transform import Rotation

from simforcing.data.episode import ActionConvention, Dataset, Episode
from simforcing.errors import SimForcingError
from simforcing.twin.robot import Robot

Follow = Literal["state", "action"]
_WIDTH = 7
_EULER = {"roll", "pitch", "yaw"}
_STILL = 0.05  # share of the gripper range that counts as its end


class UnreachableError(SimForcingError):
    """An episode has poses that the robot cannot take."""


@dataclass(frozen=True)
class Tolerance:
    """Largest miss of a pose that still counts as reached: metres and radians."""

    position: float = 0.01
    rotation: float = float(np.radians(5.0))


@dataclass(frozen=True)
class JointPath:
    """One episode as joints: `q`, gripper `opening` in [0, 1] (1 = open), and what the IK left over."""

    q: Float64[np.ndarray, "N n"]
    opening: Float64[np.ndarray, " N"]
    position_error: Float64[np.ndarray, " N"]  # metres
    rotation_error: Float64[np.ndarray, " N"]  # radians
    at_limit: Bool[np.ndarray, " N"]

    def summary(self) -> dict[str, Any]:
        """Worst errors (mm, degrees), frames with a joint at its limit, largest joint step (radians)."""
        step = float(np.abs(np.diff(self.q, axis=0)).max()) if len(self.q) > 1 else 0.0
        return {
            "frames": len(self.q),
            "position_error_mm": round(1e3 * float(self.position_error.max()), 3),
            "rotation_error_degrees": round(float(np.degrees(self.rotation_error.max())), 3),
            "frames_at_limit": int(self.at_limit.sum()),
            "joint_step": round(step, 4),
        }


def _rotation(rows: Float[np.ndarray, "N 3"], kind: str) -> Rotation:
    values = np.asarray(rows, dtype=np.float64)
    return Rotation.from_euler("xyz", values) if kind == "euler_xyz" else Rotation.from_rotvec(values)


def poses(rows: Float[np.ndarray, "N 7"], rotation: str) -> Float64[np.ndarray, "N 4 4"]:
    """Pose matrices of rows xyz, rotation, gripper; `rotation` is `rotvec` or `euler_xyz`."""
    out = np.tile(np.eye(4), (len(rows), 1, 1))
    out[:, :3, :3] = _rotation(rows[:, 3:6], rotation).as_matrix()
    out[:, :3, 3] = rows[:, :3]
    return out


def openings(values: Float[np.ndarray, " N"], convention: ActionConvention) -> Float64[np.ndarray, " N"]:
    """Gripper values as openings in [0, 1], 1 = open (clipped)."""
    low, high = convention.gripper_range
    part = np.clip((np.asarray(values, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return np.asarray(part if convention.gripper == "open_positive" else 1.0 - part)


def action_targets(
    start: Float64[np.ndarray, "N 4 4"], action: Float[np.ndarray, "N 7"], convention: ActionConvention
) -> Float64[np.ndarray, "N 4 4"]:
    """Pose at every frame by the actions: frame 0 as measured, frame i + 1 where action i leads.

    `start` are the measured poses (frame 0, and all of them for deltas relative to the state). The last
    action leads past the episode and is not used. Raises SimForcingError for absolute poses in the tool
    frame.
    """
    if convention.kind == "absolute":
        if convention.frame == "tool":
            raise SimForcingError("action convention: absolute poses need frame = base")
        return np.concatenate([start[:1], poses(action[:-1], convention.rotation)])
    change = poses(action, convention.rotation)
    out = [start[0]]
    for i in range(len(action) - 1):
        out.append(_moved(start[i] if convention.relative_to == "state" else out[-1], change[i], convention.frame))
    return np.stack(out)


def _moved(
    pose: Float64[np.ndarray, "4 4"], change: Float64[np.ndarray, "4 4"], frame: str
) -> Float64[np.ndarray, "4 4"]:
    """`pose` after a change given in its own axes (`tool`) or in the base's, about the tool's origin."""
    if frame == "tool":
        return np.asarray(pose @ change)
    out = np.eye(4)
    out[:3, :3] = change[:3, :3] @ pose[:3, :3]
    out[:3, 3] = pose[:3, 3] + change[:3, 3]
    return out


def state_rotation(dataset: Dataset, convention: ActionConvention) -> str:
    """How states store rotation: Euler angles where names say roll, pitch, yaw, else as the actions do."""
    return "euler_xyz" if set(dataset.state_names) >= _EULER else convention.rotation


def infer_gripper(dataset: Dataset, episodes: int = 20) -> Literal["open_positive", "closed_positive"] | None:
    """The sign of the gripper by the habit that episodes start with it open; None where they do not agree.

    Looks at the first states of up to `episodes` episodes, spread over the dataset, relative to
    `dataset.action_convention.gripper_range`.
    """
    low, high = dataset.action_convention.gripper_range
    picks = np.unique(np.linspace(0, len(dataset) - 1, min(episodes, len(dataset))).astype(int))
    first = np.array([float(dataset[int(i)].state[0, -1]) for i in picks])
    part = (first - low) / (high - low)
    if np.mean(part > 1 - _STILL) > 0.7:
        return "open_positive"
    return "closed_positive" if np.mean(part < _STILL) > 0.7 else None


def joint_path(
    robot: Robot,
    episode: Episode,
    convention: ActionConvention,
    *,
    rotation: str,
    follow: Follow = "state",
    offset: Float64[np.ndarray, "4 4"] | None = None,
    tolerance: Tolerance | None = None,
) -> JointPath:
    """The joint path that shows `episode`, one row a frame.

    follow: measured `state`, or the poses that the `action`s command (see `action_targets`). rotation: of the
    states. offset: pose, in the robot's end-effector frame, of the frame that the data report (default: the
    same). Raises UnreachableError, naming episode, frame and miss, for poses missed by more than `tolerance`,
    and SimForcingError for rows that are not 7 numbers.
    """
    limit = tolerance or Tolerance()
    for name, rows in (("state", episode.state), ("action", episode.action)):
        if rows.ndim != 2 or rows.shape[1] != _WIDTH:
            raise SimForcingError(
                f"{episode.where}: {name} has {rows.shape[-1]} numbers a row; replay needs 7 (xyz, rotation, gripper)"
            )
    targets = poses(episode.state, rotation)
    gripper = openings(episode.state[:, 6], convention)
    if follow == "action":
        targets = action_targets(targets, episode.action, convention)
        gripper[1:] = openings(episode.action[:-1, 6], convention)
    if offset is not None:
        targets = targets @ np.linalg.inv(offset)
    answer = robot.ik(targets)
    missed = (answer.position_error > limit.position) | (answer.rotation_error > limit.rotation)
    if missed.any():
        score = answer.position_error / limit.position + answer.rotation_error / limit.rotation
        worst = int(np.argmax(np.where(missed, score, -1.0)))
        raise UnreachableError(
            f"{episode.where}, frame {worst}: {robot.name} misses the pose of '{robot.ee_name}' by "
            f"{100 * answer.position_error[worst]:.1f} cm "
            f"and {np.degrees(answer.rotation_error[worst]):.1f} degrees "
            f"({int(missed.sum())} of {len(missed)} frames are out of reach); "
            "check --robot, --ee and --rotation, or --skip-bad"
        )
    return JointPath(answer.q, gripper, answer.position_error, answer.rotation_error, answer.at_limit)


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
