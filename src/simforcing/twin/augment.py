"""Trajectory augmentation: other motions of the same kind from recorded end-effector poses.

Pure functions of (poses, generator). N frames; a row is xyz in metres, rotation vector in radians, gripper
opening in [0, 1], all in the robot base frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from scipy.spatial.transform import Rotation, Slerp

from simforcing.errors import SimForcingError


@dataclass(frozen=True)
class Workspace:
    """Where the end-effector may be: a box, and a shell around the shoulder for the wrist behind the gripper.

    `lower`, `upper`: corners in metres. The wrist lies `tool` metres behind the end-effector against the
    approach direction; its distance from `centre` is kept within `reach`. `reach=None` leaves the box
    alone.
    """

    lower: tuple[float, float, float]
    upper: tuple[float, float, float]
    centre: tuple[float, float, float] = (0.0, 0.0, 0.0)
    tool: float = 0.0
    reach: tuple[float, float] | None = None
    approach: tuple[float, float, float] = (1.0, 0.0, 0.0)

    def clamp(self, poses: Float64[np.ndarray, "N 7"]) -> Float64[np.ndarray, "N 7"]:
        """The same poses with positions moved into the workspace and openings into [0, 1]; rotations stay."""
        out = poses.copy()
        low, high = np.array(self.lower), np.array(self.upper)
        out[:, :3] = np.clip(out[:, :3], low, high)
        if self.reach is not None:
            behind = self.tool * Rotation.from_rotvec(out[:, 3:6]).apply(np.array(self.approach))
            wrist = out[:, :3] - behind - np.array(self.centre)
            distance = np.linalg.norm(wrist, axis=1, keepdims=True)
            kept = np.clip(distance, *self.reach)
            out[:, :3] = np.clip(out[:, :3] + wrist * (kept / np.maximum(distance, 1e-9) - 1.0), low, high)
        out[:, 6] = np.clip(out[:, 6], 0.0, 1.0)
        return out

    def contains(self, poses: Float64[np.ndarray, "N 7"], slack: float = 1e-6) -> bool:
        """Whether every position lies in the box (within `slack` metres)."""
        low, high = np.array(self.lower) - slack, np.array(self.upper) + slack
        return bool(np.all((poses[:, :3] >= low) & (poses[:, :3] <= high)))


@dataclass(frozen=True)
class AugmentConfig:
    """Strength of each change: probabilities in [0, 1], metres, radians, speeds and scales as factors."""

    mirror: float = 0.5
    reverse: float = 0.3
    speed: tuple[float, float] = (0.6, 1.5)
    warp: float = 0.35
    offset: float = 0.06
    scale: tuple[float, float] = (0.7, 1.3)
    turn: float = 0.4
    waypoints: float = 0.05
    noise: float = 0.004
    toggle: float = 0.35
    max_step: float = 0.048
    max_turn: float = 0.24

    def __post_init__(self) -> None:
        for name in ("mirror", "reverse", "toggle"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise SimForcingError(f"augmentation {name}={getattr(self, name)}: a probability lies in [0, 1]")
        for name in ("speed", "scale"):
            low, high = getattr(self, name)
            if not 0.0 < low <= high:
                raise SimForcingError(f"augmentation {name}=({low}, {high}): needs 0 < low <= high")
        for name in ("warp", "offset", "turn", "waypoints", "noise"):
            if getattr(self, name) < 0.0:
                raise SimForcingError(f"augmentation {name}={getattr(self, name)}: must not be negative")
        if self.max_step <= 0.0 or self.max_turn <= 0.0:
            raise SimForcingError(f"augmentation max_step={self.max_step}, max_turn={self.max_turn}: must be positive")


def augment_trajectory(
    poses: Float64[np.ndarray, "N 7"],
    rng: np.random.Generator,
    workspace: Workspace,
    config: AugmentConfig = AugmentConfig(),
) -> Float64[np.ndarray, "N 7"]:
    """A changed trajectory of the same length, inside `workspace`, within `max_step` and `max_turn` a frame.

    In order: mirror left-right, time reversal, time warp with another speed (a path that ends early is
    followed back), offset, scaling, turn about the vertical, displaced waypoints, smooth noise, gripper
    toggles, workspace, speed limit.
    """
    if len(poses) < 2:
        raise SimForcingError(f"augmentation needs at least 2 frames, got {len(poses)}")
    out = np.asarray(poses, dtype=np.float64).copy()
    if rng.random() < config.mirror:
        out = mirror(out)
    if rng.random() < config.reverse:
        out = out[::-1].copy()
    out = resample(out, warped_times(len(out), rng, config))
    out = _displace(out, rng, config)
    if rng.random() < config.toggle:
        out[:, 6] = _toggles(out[:, 6], rng)
    return limit_speed(workspace.clamp(out), config.max_step, config.max_turn)


def jitter_start(
    poses: Float64[np.ndarray, "N 7"], rng: np.random.Generator, metres: float, radians: float
) -> Float64[np.ndarray, "N 7"]:
    """Another start: a random offset and turn about the vertical that fade away over the first third."""
    fade = np.zeros(len(poses))
    third = max(2, len(poses) // 3)
    fade[:third] = 0.5 + 0.5 * np.cos(np.pi * np.arange(third) / third)
    out = poses.copy()
    out[:, :3] += fade[:, None] * rng.uniform(-metres, metres, size=3)
    yaw = np.outer(fade * rng.uniform(-radians, radians), [0.0, 0.0, 1.0])
    out[:, 3:6] = (Rotation.from_rotvec(yaw) * Rotation.from_rotvec(out[:, 3:6])).as_rotvec()
    return continuous(out)


def passage(
    start: Float64[np.ndarray, " 7"], end: Float64[np.ndarray, " 7"], step: float, turn: float
) -> Float64[np.ndarray, "N 7"]:
    """From one pose to another, both left out, with a smooth start and stop and the largest steps a frame (m, rad)."""
    angle = (Rotation.from_rotvec(end[3:6]) * Rotation.from_rotvec(start[3:6]).inv()).magnitude()
    apart = max(float(np.linalg.norm(end[:3] - start[:3])) / step, float(angle) / turn, abs(end[6] - start[6]) / 0.5)
    frames = int(np.ceil(1.875 * apart))  # a minimum-jerk motion is 1.875 times as fast as its mean
    if frames < 2:
        return np.empty((0, 7))
    t = np.arange(1, frames) / frames
    return resample(np.stack([start, end]), t**3 * (10 - 15 * t + 6 * t**2))


def splice(
    segments: Sequence[Float64[np.ndarray, "n 7"]], frames: int, step: float, turn: float
) -> Float64[np.ndarray, "N 7"]:
    """Segments of different motions one after the other, with a `passage` between; cut, or held at the end."""
    parts = [segments[0]]
    for segment in segments[1:]:
        parts += [passage(parts[-1][-1], segment[0], step, turn), segment]
    joined = np.concatenate(parts)[:frames]
    return continuous(np.concatenate([joined, np.repeat(joined[-1:], frames - len(joined), axis=0)]))


def reach(
    recorded: Float64[np.ndarray, "M 7"],
    frames: int,
    rng: np.random.Generator,
    workspace: Workspace,
    step: float,
    turn: float,
    spread: float = 0.15,
) -> Float64[np.ndarray, "N 7"]:
    """From a recorded pose to random places of the workspace, one after another, with pauses.

    A place is up to `spread` metres along each axis from a recorded pose, whose orientation it takes, so that most can
    be reached; the gripper opens and closes at random.
    """
    rows = [recorded[rng.integers(len(recorded))][None]]
    count = 1
    while count < frames:
        goal = recorded[rng.integers(len(recorded))].copy()
        goal[:3] += rng.uniform(-spread, spread, size=3)
        goal[6] = rng.integers(2) if rng.random() < 0.5 else rows[-1][-1][6]
        goal = workspace.clamp(goal[None])[0]
        way = passage(rows[-1][-1], goal, step * rng.uniform(0.5, 1.0), turn)
        stay = np.repeat(goal[None], int(rng.integers(1, 4)), axis=0)
        rows += [way, stay]
        count += len(way) + len(stay)
    return continuous(np.concatenate(rows)[:frames])


def mirror(poses: Float64[np.ndarray, "N 7"]) -> Float64[np.ndarray, "N 7"]:
    """Left and right exchanged (y -> -y) for a gripper that is its own mirror image."""
    out = poses.copy()
    out[:, [1, 3, 5]] *= -1.0
    return out


def warped_times(n: int, rng: np.random.Generator, config: AugmentConfig) -> Float64[np.ndarray, "N"]:
    """Times in frames at which to read a path of `n` frames: varying speed; past the end it turns round."""
    speed = rng.uniform(*config.speed) * np.exp(config.warp * smooth_noise(n, rng, knots=4)[:, 0])
    times = np.concatenate([[0.0], np.cumsum(speed[:-1])]) + rng.uniform(0.0, n / 3)
    last = float(n - 1)
    return last - np.abs(np.mod(times, 2 * last) - last)


def resample(poses: Float64[np.ndarray, "N 7"], times: Float64[np.ndarray, "M"]) -> Float64[np.ndarray, "M 7"]:
    """The path at `times` (frames, within 0..N-1): linear in position and opening, slerp in rotation."""
    frames = np.arange(len(poses), dtype=np.float64)
    out = np.empty((len(times), 7))
    for column in (0, 1, 2, 6):
        out[:, column] = np.interp(times, frames, poses[:, column])
    out[:, 3:6] = Slerp(frames, Rotation.from_rotvec(poses[:, 3:6]))(times).as_rotvec()
    return continuous(out)


def continuous(poses: Float64[np.ndarray, "N 7"]) -> Float64[np.ndarray, "N 7"]:
    """The same rotations, each rotation vector chosen nearest to the one before (lengths may exceed pi)."""
    out = poses.copy()
    for i in range(1, len(out)):
        out[i, 3:6] = _nearest(out[i, 3:6], out[i - 1, 3:6])
    return out


def about(poses: Float64[np.ndarray, "N 7"], rotation: Float64[np.ndarray, "3"]) -> Float64[np.ndarray, "N 7"]:
    """The same rotations with each rotation vector chosen nearest to `rotation`.

    So a tool that is turned by about pi has one set of numbers, and not two of opposite sign.
    """
    out = poses.copy()
    for i in range(len(out)):
        out[i, 3:6] = _nearest(out[i, 3:6], rotation)
    return out


def _nearest(vector: Float64[np.ndarray, "3"], to: Float64[np.ndarray, "3"]) -> Float64[np.ndarray, "3"]:
    angle = float(np.linalg.norm(vector))
    if angle < 1e-9:
        return vector
    options = vector * (1.0 + np.array([-2.0, -1.0, 0.0, 1.0, 2.0])[:, None] * 2 * np.pi / angle)
    nearest: Float64[np.ndarray, "3"] = options[np.argmin(np.linalg.norm(options - to, axis=1))]
    return nearest


def smooth_noise(n: int, rng: np.random.Generator, *, knots: int, width: int = 1) -> Float64[np.ndarray, "N width"]:
    """Noise of about unit size that bends at `knots` places, with cosines in between."""
    values = rng.normal(size=(knots, width))
    place = np.linspace(0.0, knots - 1.0, n)
    left = np.minimum(place.astype(int), knots - 2)
    blend = (0.5 - 0.5 * np.cos(np.pi * (place - left)))[:, None]
    out: Float64[np.ndarray, "N width"] = values[left] * (1.0 - blend) + values[left + 1] * blend
    return out


def limit_speed(poses: Float64[np.ndarray, "N 7"], max_step: float, max_turn: float) -> Float64[np.ndarray, "N 7"]:
    """Follow the path by at most `max_step` metres and `max_turn` radians a frame, late if it is faster."""
    out = poses.copy()
    for i in range(1, len(out)):
        step = poses[i, :3] - out[i - 1, :3]
        out[i, :3] = out[i - 1, :3] + step * min(1.0, max_step / max(float(np.linalg.norm(step)), 1e-9))
        before = Rotation.from_rotvec(out[i - 1, 3:6])
        turn = (Rotation.from_rotvec(poses[i, 3:6]) * before.inv()).as_rotvec()
        share = min(1.0, max_turn / max(float(np.linalg.norm(turn)), 1e-9))
        out[i, 3:6] = (Rotation.from_rotvec(turn * share) * before).as_rotvec()
    return continuous(out)


def _displace(
    poses: Float64[np.ndarray, "N 7"], rng: np.random.Generator, config: AugmentConfig
) -> Float64[np.ndarray, "N 7"]:
    out = poses.copy()
    n, centre = len(out), poses[:, :3].mean(axis=0)
    out[:, :3] = centre + (out[:, :3] - centre) * rng.uniform(*config.scale, size=3)
    out[:, :3] += rng.uniform(-config.offset, config.offset, size=3)
    out[:, :3] += config.waypoints * smooth_noise(n, rng, knots=max(3, n // 6), width=3)
    out[:, :3] += config.noise * smooth_noise(n, rng, knots=max(3, n // 2), width=3)
    yaw = rng.uniform(-config.turn, config.turn) + 0.5 * config.turn * smooth_noise(n, rng, knots=3)[:, 0]
    about = np.stack([np.zeros(n), np.zeros(n), yaw], axis=1)
    out[:, 3:6] = (Rotation.from_rotvec(about) * Rotation.from_rotvec(out[:, 3:6])).as_rotvec()
    return continuous(out)


def _toggles(opening: Float64[np.ndarray, "N"], rng: np.random.Generator) -> Float64[np.ndarray, "N"]:
    """Openings replaced by a random open-close pattern with two-frame transitions."""
    n = len(opening)
    flips = np.sort(rng.choice(n, size=min(n, int(rng.integers(1, 5))), replace=False))
    state = (np.searchsorted(flips, np.arange(n), side="right") + int(rng.integers(2))) % 2
    padded = np.concatenate([state[:1], state]).astype(np.float64)
    return 0.5 * (padded[1:] + padded[:-1])
