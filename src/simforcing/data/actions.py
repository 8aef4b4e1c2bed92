"""What actions and states mean, converted: absolute and delta, frames, rotations, grippers, units, rates.

Everything goes through poses: 4x4 matrices in metres in the robot's base frame, and gripper openings (0 closed, 1
open). Row i of a trajectory is a measured pose; action i leads it to the pose of row i + 1.

Shapes: N rows of an episode, D width of a row (3 + rotation + 1), R width of a rotation (3, quaternion 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float, Float32, Float64

from simforcing.data.episode import ActionConvention, StateConvention
from simforcing.errors import SimForcingError

_METRES = {"m": 1.0, "cm": 0.01, "mm": 0.001}
_NAMES = {
    "euler_xyz": ("roll", "pitch", "yaw"),
    "rotvec": ("rx", "ry", "rz"),
    "quaternion": ("qx", "qy", "qz", "qw"),
}


Convention: TypeAlias = ActionConvention | StateConvention


def names(convention: Convention) -> tuple[str, ...]:
    """Names of a row's numbers: xyz, rotation, gripper or both fingers."""
    gripper = ("finger_1", "finger_2") if _fingers(convention) else ("gripper",)
    return ("x", "y", "z", *_NAMES[convention.rotation], *gripper)


def width(convention: Convention) -> int:
    """Numbers of a row: 7; one more with a quaternion, and with two fingers."""
    return len(names(convention))


def turns(convention: Convention) -> slice:
    """The columns that hold the rotation."""
    return slice(3, -2 if _fingers(convention) else -1)


def _fingers(convention: Convention) -> bool:
    return isinstance(convention, StateConvention) and convention.fingers


def to_poses(rows: Float[np.ndarray, "N D"], convention: Convention) -> Float64[np.ndarray, "N 4 4"]:
    """Rows as matrices in metres (of a delta: the change); the gripper is left out.

    Raises SimForcingError if rows have not the width of the convention, or a quaternion is zero.
    """
    from scipy.spatial.transform import Rotation

    _check_width(rows, convention)
    values = np.asarray(rows, np.float64)
    poses = np.tile(np.eye(4), (len(values), 1, 1))
    moved, turned = _scales(convention)
    poses[:, :3, 3] = values[:, :3] * _METRES[convention.position_unit] * moved
    angles = values[:, turns(convention)]
    if len(values) == 0:
        return poses
    if convention.rotation == "quaternion":
        if not (np.linalg.norm(angles, axis=1) > 1e-6).all():
            raise SimForcingError("rotation: a quaternion is zero; the rows are no poses, or have another rotation")
        poses[:, :3, :3] = Rotation.from_quat(angles).as_matrix()
    else:
        angles = (np.radians(angles) if convention.angle_unit == "deg" else angles) * turned
        kind = convention.rotation
        made = Rotation.from_euler("xyz", angles) if kind == "euler_xyz" else Rotation.from_rotvec(angles)
        poses[:, :3, :3] = made.as_matrix()
    base = _base(convention)
    return poses if base is None else np.asarray(np.linalg.solve(base, poses))


def _base(convention: Convention) -> Float64[np.ndarray, "4 4"] | None:
    """Where the robot's base stands in the frame of stored poses; None where that is the base itself."""
    from scipy.spatial.transform import Rotation

    if not isinstance(convention, StateConvention) or not any(convention.base):
        return None
    pose = np.eye(4)
    pose[:3, 3] = convention.base[:3]
    pose[:3, :3] = Rotation.from_rotvec(convention.base[3:]).as_matrix()
    return pose


def from_poses(
    poses: Float64[np.ndarray, "N 4 4"],
    gripper: Float64[np.ndarray, "N"],
    convention: Convention,
) -> Float32[np.ndarray, "N D"]:
    """Inverse of `to_poses`, with gripper openings in the last column, or the fingers' places in the last two.

    Rotations are the principal ones: angles in (-pi, pi], rotation vectors of at most pi, quaternions with w >= 0.
    """
    from scipy.spatial.transform import Rotation

    rows = np.empty((len(poses), width(convention)))
    base = _base(convention)
    poses = poses if base is None else base @ poses
    moved, turned = _scales(convention)
    rows[:, :3] = poses[:, :3, 3] / _METRES[convention.position_unit] / moved
    rows[:, -1] = from_openings(gripper, convention)
    if _fingers(convention):
        rows[:, -2:] = rows[:, -1:] / 2 * [1.0, -1.0]
    if len(poses):
        found = Rotation.from_matrix(poses[:, :3, :3])
        if convention.rotation == "quaternion":
            rows[:, turns(convention)] = found.as_quat(canonical=True)
        else:
            angles = found.as_euler("xyz") if convention.rotation == "euler_xyz" else found.as_rotvec()
            angles = np.degrees(angles) if convention.angle_unit == "deg" else angles
            rows[:, turns(convention)] = angles / turned
    return rows.astype(np.float32)


def _scales(convention: Convention) -> tuple[float, float]:
    """Units of position and angle that a stored 1 is."""
    if isinstance(convention, StateConvention):
        return 1.0, 1.0
    return convention.position_scale, convention.angle_scale


def to_openings(values: Float[np.ndarray, "N"], convention: Convention) -> Float64[np.ndarray, "N"]:
    """Gripper values as openings: 0 closed, 1 open; beyond the range where the values are."""
    low, high = convention.gripper_range
    part = (np.asarray(values, np.float64) - low) / (high - low)
    return np.asarray(part if convention.gripper == "open_positive" else 1.0 - part)


def openings_of(rows: Float[np.ndarray, "N D"], convention: Convention) -> Float64[np.ndarray, "N"]:
    """Openings of rows, as `to_openings` has them; of two fingers by their distance."""
    values = rows[:, -2] - rows[:, -1] if _fingers(convention) else rows[:, -1]
    return to_openings(values, convention)


def from_openings(openings: Float[np.ndarray, "N"], convention: Convention) -> Float64[np.ndarray, "N"]:
    """Inverse of `to_openings`."""
    low, high = convention.gripper_range
    part = np.asarray(openings, np.float64)
    return np.asarray(low + (part if convention.gripper == "open_positive" else 1.0 - part) * (high - low))


def targets(
    action: Float[np.ndarray, "N D"], measured: Float64[np.ndarray, "N 4 4"], convention: ActionConvention
) -> Float64[np.ndarray, "N 4 4"]:
    """Where each action leads, as absolute poses in the base frame.

    A delta changes the measured pose of its row, or the previous target (the first: the first measured pose); in the
    base frame the position moves along the base's axes and the rotation turns about them, in the tool frame both are
    the tool's. Raises SimForcingError for absolute poses in the tool frame, which say nothing.
    """
    change = to_poses(action, convention)
    if convention.kind == "absolute":
        if convention.frame == "tool":
            raise SimForcingError("action convention: absolute poses need frame = base")
        return change
    _check_length(action, measured)
    out = np.empty_like(change)
    for i in range(len(change)):
        before = measured[i] if convention.relative_to == "state" or i == 0 else out[i - 1]
        out[i] = _moved(before, change[i], convention.frame)
    return out


def changes(
    reached: Float64[np.ndarray, "N 4 4"], measured: Float64[np.ndarray, "N 4 4"], convention: ActionConvention
) -> Float64[np.ndarray, "N 4 4"]:
    """Inverse of `targets`: absolute targets as what the convention stores. Raises as `targets` does."""
    if convention.kind == "absolute":
        if convention.frame == "tool":
            raise SimForcingError("action convention: absolute poses need frame = base")
        return reached
    _check_length(reached, measured)
    before = measured if convention.relative_to == "state" else np.concatenate([measured[:1], reached[:-1]])
    if convention.frame == "tool":
        return np.asarray(np.linalg.solve(before, reached))
    out = np.tile(np.eye(4), (len(reached), 1, 1))
    out[:, :3, :3] = reached[:, :3, :3] @ before[:, :3, :3].transpose(0, 2, 1)
    out[:, :3, 3] = reached[:, :3, 3] - before[:, :3, 3]
    return out


def convert_actions(
    action: Float[np.ndarray, "N D"],
    measured: Float64[np.ndarray, "N 4 4"],
    source: ActionConvention,
    wanted: ActionConvention,
) -> Float32[np.ndarray, "N D"]:
    """Actions of one episode in another convention; `measured` are its states as poses (see `to_poses`).

    Rates are not changed here, see `resample`. Raises SimForcingError for rows of another width than the convention's.
    """
    moving = ("kind", "relative_to", "frame")
    same = all(getattr(source, name) == getattr(wanted, name) for name in moving)
    poses = to_poses(action, source) if same else changes(targets(action, measured, source), measured, wanted)
    return from_poses(poses, to_openings(action[:, -1], source), wanted)


def convert_states(
    state: Float[np.ndarray, "N D"], source: StateConvention, wanted: StateConvention
) -> Float32[np.ndarray, "N D"]:
    """States of one episode in another convention. Raises SimForcingError for rows of another width."""
    return from_poses(to_poses(state, source), openings_of(state, source), wanted)


def integrate(
    action: Float[np.ndarray, "N D"], convention: ActionConvention
) -> tuple[Float64[np.ndarray, "N 4 4"], Float64[np.ndarray, "N"]]:
    """Poses and openings that deltas alone tell, from the identity at row 0: for data without states.

    The gripper at a row is what the action before commanded (row 0: its own). Raises SimForcingError for absolute
    actions.
    """
    if convention.kind != "delta":
        raise SimForcingError("action convention: only deltas can be added up to states")
    change = to_poses(action, convention)
    poses = np.tile(np.eye(4), (len(change), 1, 1))
    for i in range(1, len(change)):
        poses[i] = _moved(poses[i - 1], change[i - 1], convention.frame)
    opening = to_openings(action[:, -1], convention)
    return poses, np.concatenate([opening[:1], opening[:-1]])


def resample(length: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that every `step`-th frame keeps, and the row whose absolute action leads to the next of them.

    Between kept rows j * step and (j + 1) * step the last action is the one that leads there; after the last kept row
    it is the last there is.
    """
    kept = np.arange(0, length, step)
    return kept, np.minimum(kept + step - 1, length - 1)


def circular_mean(rows: Iterable[Float[np.ndarray, "N R"]]) -> Float64[np.ndarray, "R"]:
    """Mean direction of angles in radians, per column, over all rows: where a dataset's angles lie."""
    total: Any = sum(np.exp(1j * np.asarray(part, np.float64)).sum(axis=0) for part in rows)
    return np.asarray(np.angle(total))


def unwrap(
    turns: Float[np.ndarray, "N R"], rotation: str, near: Float[np.ndarray, "R"] | None = None
) -> Float64[np.ndarray, "N R"]:
    """The same rotations without jumps from row to row (radians): every row as close to the one before as it can be.

    Euler angles gain or lose full turns, rotation vectors full turns about their axis, quaternions their sign. near:
    where the episode should lie, so that episodes agree with each other: angles are shifted so that their mean is
    within half a turn of it, of vectors and quaternions the first row is taken nearest to it.
    """
    values = np.asarray(turns, np.float64).copy()
    if len(values) == 0:
        return values
    if rotation == "euler_xyz":
        smooth = np.unwrap(values, axis=0)
        if near is not None:
            smooth -= 2 * np.pi * np.round((smooth.mean(axis=0) - near) / (2 * np.pi))
        return np.asarray(smooth)
    last = values[0] if near is None else np.asarray(near, np.float64)
    for i, value in enumerate(values):
        last = _closest(value, last, rotation)
        values[i] = last
    return values


def _closest(value: Float64[np.ndarray, "R"], last: Float64[np.ndarray, "R"], rotation: str) -> np.ndarray:
    if rotation == "quaternion":
        return -value if value @ last < 0 else value
    size = float(np.linalg.norm(value))
    axis = value / size if size > 1e-9 else last / max(float(np.linalg.norm(last)), 1e-9)
    turns = np.round((float(axis @ last) - size) / (2 * np.pi))
    return np.asarray(axis * (size + 2 * np.pi * turns)) if turns else value


def _moved(
    pose: Float64[np.ndarray, "4 4"], change: Float64[np.ndarray, "4 4"], frame: str
) -> Float64[np.ndarray, "4 4"]:
    if frame == "tool":
        return np.asarray(pose @ change)
    out = np.eye(4)
    out[:3, :3] = change[:3, :3] @ pose[:3, :3]
    out[:3, 3] = pose[:3, 3] + change[:3, 3]
    return out


def _check_width(rows: np.ndarray, convention: Convention) -> None:
    if rows.ndim != 2 or rows.shape[1] != width(convention):
        raise SimForcingError(
            f"rows have shape {list(rows.shape)}; {', '.join(names(convention))} are {width(convention)} numbers a row"
        )


def _check_length(rows: Sequence[Any] | np.ndarray, measured: np.ndarray) -> None:
    if len(rows) != len(measured):
        raise SimForcingError(f"{len(rows)} actions but {len(measured)} states; deltas need as many of each")
