"""Simulated rollouts on augmented trajectories, one at a time, and the limits that they keep to.

Each rollout is another motion of the same arm, drawn as the pairs' simulated view is, with actions in the pairs'
convention: a changed recorded motion, segments of several, or reaching for random places. Only motions that the arm can
make are taken: poses reached, joints within limits and no faster than recorded, nothing below the lowest point that the
recorded arm ever came to (the table).

Shapes: N frames, n arm joints; a row is xyz (metres), rotation vector (radians), gripper opening, in the base frame.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float32, Float64, UInt8
from scipy.ndimage import gaussian_filter1d, maximum_filter1d
from scipy.spatial.transform import Rotation

from simforcing.data import ActionConvention, Dataset, StateConvention
from simforcing.data.actions import changes, from_poses, openings_of, targets, to_poses
from simforcing.errors import SimForcingError
from simforcing.twin.augment import (
    AugmentConfig,
    Workspace,
    augment_trajectory,
    continuous,
    jitter_start,
    limit_speed,
    reach,
    resample,
    splice,
)
from simforcing.twin.camera import Camera
from simforcing.twin.playground import WorldConfig, simulate
from simforcing.twin.render import KeptRenderer
from simforcing.twin.robot import Robot

Kind = Literal["changed", "spliced", "reaching"]
WITHOUT_TASK = "move the arm"
"""Instruction of rollouts whose motion is nobody's task any more."""

_MARGIN = 0.05  # metres by which rollouts may leave the box of the recorded positions
_SAMPLE = 50  # episodes, spread over the dataset, from which limits are taken
_POSITION, _TURN = 0.005, float(np.radians(2.0))  # a pose missed by more is not one that the arm can make
_SINK = 0.002  # metres


@dataclass(frozen=True)
class RolloutConfig:
    """How rollouts are made. spliced, reaching: shares of these kinds, the rest are changed motions.

    change: strength of what is done to recorded motions. start: metres by which the first pose is moved.
    attempts: motions to draw before a rollout is given up. Raises SimForcingError for shares that are none.
    """

    spliced: float = 0.25
    reaching: float = 0.25
    start: float = 0.06
    attempts: int = 30
    change: AugmentConfig = field(default_factory=lambda: AugmentConfig(mirror=0.0, reverse=0.1, offset=0.04))

    def __post_init__(self) -> None:
        if not (min(self.spliced, self.reaching) >= 0 and self.spliced + self.reaching <= 1):
            raise SimForcingError(
                f"augmentation spliced={self.spliced}, reaching={self.reaching}: shares must not be negative and "
                "sum to at most 1"
            )
        if self.attempts < 1 or not 0 <= self.start < np.inf:
            raise SimForcingError(f"augmentation attempts={self.attempts}, start={self.start}: must be positive")


@dataclass(frozen=True)
class Limits:
    """What the recorded motions keep to; rollouts do, too. Metres and radians, steps from frame to frame."""

    lower: tuple[float, float, float]
    upper: tuple[float, float, float]
    table: float  # lowest height of wrist, hand and fingers
    step: float
    turn: float
    joint_step: float
    lead: float  # frames from an action to the state that it leads to

    @property
    def workspace(self) -> Workspace:
        """The box of positions."""
        return Workspace(self.lower, self.upper)


@dataclass(frozen=True)
class Rollout:
    """One rollout: rows of states and actions as stored, its pictures, and how it was made."""

    kind: Kind
    task: str
    state: Float32[np.ndarray, "N W"]
    action: Float32[np.ndarray, "N W"]
    sim: UInt8[np.ndarray, "N H W 3"]
    lowest: float
    attempts: int


@dataclass(frozen=True)
class RolloutJob:
    """What is the same for all rollouts of a run; it travels to the workers. limits: None until they are found.

    cameras: of each episode of the pairs that has its own, by its number; else `camera`.
    """

    pairs: Path
    robot: str
    ee: str
    convention: ActionConvention
    state: StateConvention
    offset: Float64[np.ndarray, "4 4"] | None
    camera: Camera
    cameras: Mapping[int, Camera]
    config: RolloutConfig
    per_episode: int
    seed: int
    world: WorldConfig | None  # of pairs of the bundled world, which is drawn in its own way
    limits: Limits | None = None


class Maker:
    """Makes rollouts of one job."""

    def __init__(self, job: RolloutJob, data: Dataset, robot: Robot) -> None:
        self.job, self.data, self.robot = job, data, robot
        self.renderer = KeptRenderer(robot, job.camera)

    def rows(self, episode: int) -> Float64[np.ndarray, "N 7"]:
        """Poses of the end effector (of the robot's frame) and openings of a recorded episode."""
        state = self.data[episode].state
        poses = to_poses(state, self.job.state)
        if self.job.offset is not None:
            poses = poses @ np.linalg.inv(self.job.offset)
        turns = Rotation.from_matrix(poses[:, :3, :3]).as_rotvec()
        opening = np.clip(openings_of(state, self.job.state), 0.0, 1.0)
        return continuous(np.column_stack([poses[:, :3, 3], turns, opening]))

    def make(self, episode: int, number: int) -> Rollout | None:
        """The rollout `number` of an episode, always the same; None where no motion works out."""
        job, limits = self.job, self.job.limits
        assert limits is not None
        frames = len(self.data[episode].state)
        longer = frames + int(np.ceil(limits.lead)) + 1  # the last actions lead past the last frame
        kind = self._kind(np.random.default_rng([job.seed, episode, number]))
        for attempt in range(job.config.attempts):
            rng = np.random.default_rng([job.seed, episode, number, 1 + attempt])
            rows = self._motion(kind, episode, longer, rng)
            found = self._joints(rows)
            if found is not None:
                q, lowest = found
                task = self.data[episode].task if kind == "changed" else WITHOUT_TASK
                state, action = self._numbers(q, rows[:, 6], frames)
                sim = self._draw(q[:frames], rows[:frames], job.cameras.get(episode))
                return Rollout(kind, task, state, action, sim, lowest, attempt + 1)
        return None

    def _kind(self, rng: np.random.Generator) -> Kind:
        value, config = rng.random(), self.job.config
        if value < config.reaching:
            return "reaching"
        return "spliced" if value < config.reaching + config.spliced and len(self.data) > 1 else "changed"

    def _motion(self, kind: Kind, episode: int, frames: int, rng: np.random.Generator) -> Float64[np.ndarray, "N 7"]:
        config, limits = self.job.config, self.job.limits
        assert limits is not None
        own = self.rows(episode)
        if kind == "reaching":
            made = reach(own, frames, rng, limits.workspace, limits.step, limits.turn)
            return limit_speed(limits.workspace.clamp(made), limits.step, limits.turn)
        if kind == "spliced":
            others = [j for j in range(len(self.data)) if j != episode]
            picks = rng.choice(others, size=min(len(others), int(rng.integers(1, 3))), replace=False)
            pieces = [self._piece(own, rng), *(self._piece(self.rows(int(j)), rng) for j in picks)]
            own = splice(pieces, frames, limits.step, limits.turn)
        else:
            own = np.concatenate([own, np.repeat(own[-1:], max(0, frames - len(own)), axis=0)])[:frames]
        own = jitter_start(own, rng, config.start, config.change.turn / 2)
        change = AugmentConfig(**{**asdict(config.change), "max_step": limits.step, "max_turn": limits.turn})
        return augment_trajectory(own, rng, limits.workspace, change)

    def _piece(self, rows: Float64[np.ndarray, "N 7"], rng: np.random.Generator) -> Float64[np.ndarray, "n 7"]:
        length = max(2, int(len(rows) * rng.uniform(0.3, 0.7)))
        first = int(rng.integers(0, max(1, len(rows) - length + 1)))
        return rows[first : first + length]

    def _joints(self, rows: Float64[np.ndarray, "N 7"]) -> tuple[Float64[np.ndarray, "N n"], float] | None:
        """The joint path of a motion, lifted off the table (in place), and its lowest point; None if it is none."""
        limits = self.job.limits
        assert limits is not None
        for _ in range(4):
            answer = self.robot.ik(matrices(rows), restarts=0)
            if answer.position_error.max() > _POSITION or answer.rotation_error.max() > _TURN:
                return None
            low = lowest_points(self.robot, answer.q, rows[:, 6])
            if low.min() >= limits.table - _SINK:
                steps = np.abs(np.diff(answer.q, axis=0)).max() if len(rows) > 1 else 0.0
                return None if steps > limits.joint_step else (answer.q, float(low.min()))
            sunk = np.maximum(limits.table - low, 0.0)
            rows[:, 2] += gaussian_filter1d(maximum_filter1d(sunk, 7), 2.0, mode="nearest") * 1.1
            rows[:] = limit_speed(rows, limits.step, limits.turn)
        return None

    def _numbers(
        self, q: Float64[np.ndarray, "L n"], opening: Float64[np.ndarray, " L"], frames: int
    ) -> tuple[Float32[np.ndarray, "N W"], Float32[np.ndarray, "N W"]]:
        """States and actions as the pairs store them: action i is where the arm is `lead` frames later."""
        job, limits = self.job, self.job.limits
        assert limits is not None
        reached = self.robot.fk_path(q)
        if job.offset is not None:
            reached = reached @ job.offset
        turns = Rotation.from_matrix(reached[:, :3, :3]).as_rotvec()
        later = np.minimum(np.arange(frames) + limits.lead, len(q) - 1.0)
        ahead = resample(continuous(np.column_stack([reached[:, :3, 3], turns, opening])), later)
        measured = reached[:frames]
        action = from_poses(changes(matrices(ahead), measured, job.convention), ahead[:, 6], job.convention)
        return from_poses(measured, opening[:frames], job.state), action

    def _draw(
        self, q: Float64[np.ndarray, "N n"], rows: Float64[np.ndarray, "N 7"], camera: Camera | None
    ) -> UInt8[np.ndarray, "N H W 3"]:
        if self.job.world is not None:
            return simulate(rows, self.job.world)
        renderer = self.renderer(camera)
        return np.stack([renderer.picture(row, float(o)) for row, o in zip(q, rows[:, 6], strict=True)])


def matrices(rows: Float64[np.ndarray, "N 7"]) -> Float64[np.ndarray, "N 4 4"]:
    """Poses of rows xyz, rotation vector, opening."""
    return to_poses(rows, StateConvention())


def lowest_points(
    robot: Robot, q: Float64[np.ndarray, "N n"], opening: Float64[np.ndarray, " N"]
) -> Float64[np.ndarray, " N"]:
    """Height in the base frame (metres) of the lowest point of wrist, hand and fingers, by their bounding boxes."""
    points = [robot.surface_points(row, float(o), size=1.0, wrist=True) for row, o in zip(q, opening, strict=True)]
    return np.array([cloud[:, 2].min() for cloud in points])


def find_limits(maker: Maker, follows_action: bool) -> Limits:
    """What the recorded motions keep to, from up to 50 episodes spread over the dataset.

    follows_action: the pairs show commanded poses, so that an action leads to the next frame. Raises SimForcingError
    where the robot cannot follow the recorded states.
    """
    data, robot = maker.data, maker.robot
    picks = np.unique(np.linspace(0, len(data) - 1, min(len(data), _SAMPLE)).astype(int))
    recorded = [maker.rows(int(i)) for i in picks]
    positions = np.concatenate([rows[:, :3] for rows in recorded])
    steps, turns, joints, lowest = [1e-3], [1e-2], [1e-2], np.inf
    for number, rows in zip(picks, recorded, strict=True):
        answer = robot.ik(matrices(rows))
        if answer.position_error.max() > 10 * _POSITION:
            raise SimForcingError(
                f"episode {number} of {data.root}: {robot.name} misses its poses by "
                f"{100 * answer.position_error.max():.0f} cm; is this the robot of the pairs?"
            )
        lowest = min(lowest, float(lowest_points(robot, answer.q, rows[:, 6]).min()))
        if len(rows) > 1:
            steps.append(float(np.linalg.norm(np.diff(rows[:, :3], axis=0), axis=1).max()))
            pair = Rotation.from_rotvec(rows[:, 3:6])
            turns.append(float((pair[1:] * pair[:-1].inv()).magnitude().max()))
            joints.append(float(np.abs(np.diff(answer.q, axis=0)).max()))
    low, high = positions.min(axis=0) - _MARGIN, positions.max(axis=0) + _MARGIN
    return Limits(
        lower=(float(low[0]), float(low[1]), float(low[2])),
        upper=(float(high[0]), float(high[1]), float(high[2])),
        table=lowest,
        step=float(np.percentile(steps, 90)),
        turn=float(np.percentile(turns, 90)),
        joint_step=1.5 * float(np.max(joints)),
        lead=1.0 if follows_action else find_lead(maker, picks.tolist()),
    )


def find_lead(maker: Maker, episodes: Sequence[int]) -> float:
    """Frames from an action to the state that comes closest to where it leads, over all of `episodes`; 0 to 4."""
    leads = np.arange(0.0, 4.01, 0.1)
    total = np.zeros(len(leads))
    for number in episodes:
        episode = maker.data[number]
        measured = to_poses(episode.state, maker.job.state)
        if len(measured) < 8:
            continue
        wanted = targets(episode.action, measured, maker.job.convention)[:, :3, 3]
        n = len(measured) - 4
        for i, lead in enumerate(leads):
            at = np.arange(n) + lead
            reached = np.stack([np.interp(at, np.arange(len(measured)), measured[:, k, 3]) for k in range(3)], axis=1)
            total[i] += float(np.linalg.norm(reached - wanted[:n], axis=1).sum())
    return float(leads[np.argmin(total)]) if total.any() else 1.0
