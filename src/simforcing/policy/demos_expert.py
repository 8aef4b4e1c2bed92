"""A scripted expert for LIBERO's pick-and-place tasks, from the simulator's state.

It goes above the thing, down, closes, lifts, carries, lowers, opens, and goes up again; where it has lost the thing it
begins anew. Its motion has noise that is part of the actions, so that no two demonstrations are alike and the way back
is shown, too. Metres and radians; actions are the environment's own: a change of 1 is 5 cm or 0.5 rad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from simforcing.errors import SimForcingError
from simforcing.policy.demos_grasp import FINGER, PALM, Bodies, Grasp, clear_height, find_grasp, turned
from simforcing.policy.libero_env import Libero

Array = np.ndarray[Any, np.dtype[Any]]
Phase = Literal["above", "down", "close", "lift", "carry", "lower", "open", "away", "done"]
METRES, RADIANS = 0.05, 0.5
"""What a change of 1 means."""
NOISY = {"above": 1.0, "down": 0.5, "close": 0.25, "lift": 0.6, "carry": 1.0, "lower": 0.5, "open": 0.25, "away": 1.0}
"""Share of the noise in each phase."""
SLIPPED = 0.035
"""How far a held thing may move in the hand."""


@dataclass(frozen=True)
class Manner:
    """How one demonstration moves: drawn once for each.

    speed: greatest change of an action. gain: of the error in place, per step. noise: spread of what is added to the
    change, which fades by `memory` a step. above: height from which it goes down. aim, yaw: how the grasp is missed.
    release: how the place to let go is missed.
    """

    speed: float
    gain: float
    noise: float
    memory: float
    above: float
    aim: Float[Array, "3"]
    yaw: float
    release: Float[Array, "3"]

    @classmethod
    def draw(cls, rng: np.random.Generator, noise: float = 1.0) -> Manner:
        """As the random numbers want it; `noise` scales all that disturbs."""
        return cls(
            speed=rng.uniform(0.75, 1.0),
            gain=rng.uniform(1.2, 1.6),
            noise=0.08 * noise,
            memory=rng.uniform(0.5, 0.8),
            above=rng.uniform(0.05, 0.09),
            aim=noise * rng.normal(0.0, [0.003, 0.003, 0.002]),
            yaw=noise * rng.normal(0.0, 0.06),
            release=noise * rng.normal(0.0, [0.005, 0.005, 0.003]),
        )


@dataclass(frozen=True)
class Goal:
    """What a task asks for: a thing in or on another."""

    relation: Literal["in", "on"]
    thing: str
    target: str

    @classmethod
    def of(cls, environment: Libero) -> Goal:
        """Raises SimForcingError for a task that asks for something else."""
        wanted = environment.control.env.parsed_problem["goal_state"]
        if len(wanted) != 1 or len(wanted[0]) != 3 or wanted[0][0] not in ("in", "on"):
            raise SimForcingError(
                f"{environment.task.name} ({environment.task.instruction}): the expert puts one thing in or on "
                "another; choose other --tasks"
            )
        return cls(*wanted[0])


class Expert:
    """One demonstration. `action` is asked once a step until `phase` is done.

    Raises:
        SimForcingError: the task asks for something that it cannot do.
    """

    def __init__(self, environment: Libero, seed: int, noise: float = 1.0) -> None:
        self.goal, self.bodies = Goal.of(environment), Bodies(environment)
        self.environment = environment
        self.rng = np.random.default_rng(seed)
        self.manner = Manner.draw(self.rng, noise)
        self.phase: Phase = "above"
        self._added = np.zeros(6)
        self._since = 0
        self._opening = np.inf
        self._grip = np.zeros(3)
        self._begin()

    def _begin(self) -> None:
        """Choose a grasp and go for it."""
        place, axes = self.bodies.gripper()
        grasp = find_grasp(self.bodies, self.goal.thing, float(np.arctan2(axes[1, 0], axes[0, 0])), self.rng)
        self.grasp = Grasp(grasp.place + self.manner.aim, grasp.yaw + self.manner.yaw)
        passed = clear_height(self.bodies.others(self.goal.thing), place, self.grasp.place)
        self.over = max(self.grasp.place[2] + self.manner.above, passed + FINGER + 0.02)
        self._enter("above")

    def _enter(self, phase: Phase) -> None:
        self.phase, self._since = phase, 0

    def action(self) -> Float[Array, "7"]:
        """What to do now."""
        place, axes = self.bodies.gripper()
        wanted, near = self._wanted(place)
        self._since += 1
        change = np.zeros(6)
        change[:3] = self.manner.gain * (wanted - place) / METRES
        size = np.abs(change[:3]).max()
        change[:3] *= min(1.0, self.manner.speed / max(size, 1e-9))
        change[3:] = np.clip(1.5 * self._turn(axes) / RADIANS, -0.4, 0.4)
        fresh = self.rng.normal(0.0, [self.manner.noise] * 3 + [0.4 * self.manner.noise] * 3)
        self._added = self.manner.memory * self._added + fresh
        gripper = 1.0 if self.phase in ("close", "lift", "carry", "lower") else -1.0
        change += NOISY[self.phase] * self._added
        self._go_on(place, float(np.linalg.norm(wanted - place)) < near)
        return np.append(np.clip(change, -1.0, 1.0), gripper)

    def _turn(self, axes: Float[Array, "3 3"]) -> Float[Array, "3"]:
        """Rotation vector to a gripper that points down at the grasp's yaw."""
        from scipy.spatial.transform import Rotation

        now = float(np.arctan2(axes[1, 0], axes[0, 0]))
        yaw = now + turned(self.grasp.yaw, now)
        close = np.array([np.cos(yaw), np.sin(yaw), 0.0])
        wanted = np.stack([close, np.array([close[1], -close[0], 0.0]), np.array([0.0, 0.0, -1.0])], axis=1)
        return np.asarray(Rotation.from_matrix(wanted @ axes.T).as_rotvec())

    def _wanted(self, place: Float[Array, "3"]) -> tuple[Float[Array, "3"], float]:
        """Where the gripper goes in this phase, and how near is there."""
        grasp = self.grasp.place
        if self.phase == "above":
            return np.array([*grasp[:2], self.over]), 0.02
        if self.phase in ("down", "close"):
            return grasp, 0.006
        if self.phase == "lift":
            return np.array([*place[:2], self._carry_height(place)]), 0.025
        drop = self._drop(place)
        if self.phase == "carry":
            return np.array([*drop[:2], max(drop[2], self._carry_height(place))]), 0.018
        if self.phase == "away":
            return self._left + np.array([0.0, 0.0, 0.12]), 0.05
        return drop, 0.008

    def _held(self, place: Float[Array, "3"]) -> Float[Array, "3"]:
        """The thing's origin, seen from the gripper."""
        return self.bodies.place(self.goal.thing) - place

    def _hanging(self, place: Float[Array, "3"]) -> float:
        """How far the thing, or else the fingers, reach below the gripper."""
        return max(FINGER, float(place[2]) - self.bodies.bottom(self.goal.thing))

    def _carry_height(self, place: Float[Array, "3"]) -> float:
        goal = self._target()
        passed = clear_height(self.bodies.others(self.goal.thing), place, goal)
        return max(passed, float(goal[2])) + self._hanging(place) + 0.025

    def _target(self) -> Float[Array, "3"]:
        return self.bodies.place(self.goal.target)

    def _drop(self, place: Float[Array, "3"]) -> Float[Array, "3"]:
        """Where the gripper lets go."""
        target = self._target() + np.array([*self.manner.release[:2], 0.0])
        over = target[:2] - self._held(place)[:2]
        if self.goal.relation == "on":
            rest = float(self.bodies.boxes(self.goal.target)[..., 2].min()) + 0.012
            return np.array([*over, rest + self._hanging(place) + abs(self.manner.release[2])])
        parent = self.goal.target.removesuffix("_contain_region")
        rim = float(self.bodies.boxes(parent)[..., 2].max())
        lowest = rim - PALM + 0.02  # the hand stays above the rim
        return np.array([*over, max(lowest, rim - 0.08 + self._hanging(place))])

    def _go_on(self, place: Float[Array, "3"], there: bool) -> None:
        """The next phase, where this one is over."""
        late = self._since >= 60
        opening = float(np.abs(self.environment.state()[6:]).sum())
        still = self._since >= 5 and (abs(opening - self._opening) < 0.001 or self._since >= 20)
        if self.phase in ("above", "down", "carry", "lower") and (there or late):
            following: dict[Phase, Phase] = {"above": "down", "down": "close", "carry": "lower", "lower": "open"}
            self._enter(following[self.phase])
        elif self.phase == "close" and still:
            self._grip = self._held(place)
            self._enter("lift")
        elif self.phase == "lift" and (there or late):
            self._enter("carry")
        elif self.phase == "open" and still:
            self._left = place
            self._enter("away")
        elif self.phase == "away" and (there or self._since >= 12):
            self._enter("done")
        self._opening = opening
        if self.phase in ("lift", "carry", "lower") and np.linalg.norm(self._held(place) - self._grip) > SLIPPED:
            self._begin()
