"""Any supported dataset -> LeRobot v3.0, in the same or another convention of its actions and states.

Shapes: N rows of an episode, D width of a row, H W picture size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Float64

from simforcing.data import actions
from simforcing.data.audit import open_checked
from simforcing.data.episode import ActionConvention, Dataset, Episode, StateConvention
from simforcing.data.episode import Gripper as GripperSign
from simforcing.data.episode import Rotation as RotationKind
from simforcing.data.lerobot_writer import LeRobotWriter
from simforcing.errors import SimForcingError
from simforcing.files import check_new

_PLAIN: dict[str, Any] = {"position_unit": "m", "angle_unit": "rad"}


@dataclass(frozen=True)
class Wanted:
    """What to change; None keeps what the data have.

    unwrap: take full turns out of absolute rotations, so that angles do not jump at pi. state_from_actions: make up for
    missing states by adding up the deltas, from the identity at each episode's first row.
    """

    kind: Literal["absolute", "delta"] | None = None
    relative_to: Literal["state", "target"] | None = None
    frame: Literal["base", "tool"] | None = None
    rotation: RotationKind | None = None
    gripper: GripperSign | None = None
    gripper_range: tuple[float, float] | None = None
    fps: float | None = None
    unwrap: bool = True
    state_from_actions: bool = False

    def __post_init__(self) -> None:
        if self.fps is not None and not 0 < self.fps < np.inf:
            raise SimForcingError(f"fps {self.fps:g}: give a rate above zero")
        if self.gripper_range is not None:
            low, high = self.gripper_range
            if not (np.isfinite([low, high]).all() and low != high):
                raise SimForcingError(f"gripper range {low:g} to {high:g}: give two different numbers")

    def action(self, source: ActionConvention, fps: float) -> ActionConvention:
        """The convention of actions after the change; lengths are metres, angles radians."""
        given = {name: getattr(self, name) for name in ("kind", "frame", "rotation", "gripper", "gripper_range")}
        changed = {name: value for name, value in given.items() if value is not None}
        kind = self.kind or source.kind
        relative = (self.relative_to or source.relative_to or "state") if kind == "delta" else None
        if kind == "absolute" and self.frame is None:
            changed["frame"] = "base"
        return replace(source, **changed, relative_to=relative, hz=fps, **_PLAIN, position_scale=1.0, angle_scale=1.0)

    def state(self, source: StateConvention) -> StateConvention:
        """The convention of states after the change; fingers stay where they are, in metres."""
        names = ("rotation",) if source.fingers else ("rotation", "gripper", "gripper_range")
        given = {name: getattr(self, name) for name in names}
        changed = {name: value for name, value in given.items() if value is not None}
        return replace(source, **changed, **_PLAIN)

    @property
    def poses(self) -> list[str]:
        """What of it needs states and actions to be poses."""
        moved = ("kind", "relative_to", "frame", "rotation", "gripper", "gripper_range")
        return [name for name in moved if getattr(self, name) is not None]


@dataclass(frozen=True)
class Converted:
    """What `convert` made. skipped: position and reason of episodes that were left out."""

    out: Path
    episodes: int
    frames: int
    skipped: tuple[tuple[int, str], ...]
    action: ActionConvention


def convert(
    source: Path | str,
    out: Path | str,
    wanted: Wanted | None = None,
    *,
    skip_bad: bool = False,
    report: Callable[[str, int, int], None] | None = None,
) -> Converted:
    """Write `source` as the LeRobot v3.0 dataset `out`: all cameras, states, actions and instructions.

    Conventions, and where it comes from, are stored in `meta/simforcing.json`. Raises SimForcingError for an existing
    `out`, a dataset with errors (skip_bad leaves those episodes out), a rate that does not divide the data's, a change
    that needs poses where there are none, and pictures with odd sides.
    """
    target, want = Path(out), wanted or Wanted()
    check_new(target, Path(source))
    tell = report or (lambda stage, done, total: None)
    data = open_checked(source, skip_bad=skip_bad, video=skip_bad, report=report)
    plan = _plan(data, want)
    first = data[0]
    sizes = {key: (int(shape[1]), int(shape[2])) for key in data.cameras for shape in [first.frames(key, [0]).shape]}
    frames = 0
    with LeRobotWriter(
        target,
        fps=plan.fps,
        robot=data.robot,
        cameras=sizes,
        state_names=plan.state_names,
        action_names=plan.action_names,
        meta=plan.meta,
    ) as writer:
        for done in range(len(data)):
            episode = data[done]
            state, action = plan.rows(episode)
            rows = range(0, episode.length, plan.step)
            pictures = {key: episode.frames(key, rows) for key in data.cameras}
            writer.add_episode(pictures, state, action, episode.task)
            frames += len(state)
            tell("convert", done + 1, len(data))
    return Converted(target, len(data), frames, data.skipped, plan.action)


@dataclass(frozen=True)
class _Plan:
    """What to do with every episode. state_from: None where states are no poses and stay as they are."""

    step: int
    fps: float
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]
    action_from: ActionConvention
    action: ActionConvention
    state_from: StateConvention | None
    state: StateConvention | None
    want: Wanted
    near: Float64[np.ndarray, "R"] | None
    meta: dict[str, Any]

    def rows(self, episode: Episode) -> tuple[Float32[np.ndarray, "N D"], Float32[np.ndarray, "N D"]]:
        """State and action of one episode as they are to be written."""
        kept, leading = actions.resample(episode.length, self.step)
        if self.state is None:
            return episode.state[kept], episode.action[leading]
        state, measured = self._state(episode)
        action = episode.action
        if self.step > 1:
            reached = actions.targets(action, measured, self.action_from)[leading]
            poses = actions.changes(reached, measured[kept], self.action)
            opening = actions.to_openings(action[leading, -1], self.action_from)
            action = actions.from_poses(poses, opening, self.action)
        elif replace(self.action_from, hz=self.action.hz) != self.action:
            action = actions.convert_actions(action, measured, self.action_from, self.action)
        state = state[kept]
        if self.want.unwrap:
            state = self._smooth(state, self.state)
            if self.action.kind == "absolute":
                action = self._smooth(action, self.action)
        return state, action

    def _state(self, episode: Episode) -> tuple[Float32[np.ndarray, "N D"], Float64[np.ndarray, "N 4 4"]]:
        """States in the wanted convention, and as poses."""
        assert self.state is not None
        if self.state_from is None:
            poses, opening = actions.integrate(episode.action, self.action_from)
            return actions.from_poses(poses, opening, self.state), poses
        poses = actions.to_poses(episode.state, self.state_from)
        if self.state_from == self.state:
            return episode.state, poses
        return actions.convert_states(episode.state, self.state_from, self.state), poses

    def _smooth(self, rows: Float32[np.ndarray, "N D"], convention: actions.Convention) -> Float32[np.ndarray, "N D"]:
        turns = rows[:, actions.turns(convention)]
        near = self.near if self.near is not None and len(self.near) == turns.shape[1] else None
        out = rows.copy()
        out[:, actions.turns(convention)] = actions.unwrap(turns, convention.rotation, near)
        return out


def _plan(data: Dataset, want: Wanted) -> _Plan:
    step = _step(data, want)
    fps = data.fps / step
    convention, stored = data.action_convention, data.state_convention
    poses = _is_pose(data, want)
    action = want.action(convention, fps) if poses else replace(convention, hz=fps)
    state = None
    if poses:
        rotation = want.rotation or (stored.rotation if stored else convention.rotation)
        base = stored or StateConvention(rotation, convention.gripper, convention.gripper_range)
        state = want.state(base)
    elif step > 1 and convention.kind == "delta":
        raise SimForcingError(
            f"{data.root}: deltas that are no poses cannot be brought to {fps:g} a second; keep the rate"
        )
    meta = {**data.meta, "action": action.to_dict(), "source": {"dataset": data.root.name, "format": data.format}}
    if state is not None:
        meta["state"] = state.to_dict()
    plan = _Plan(
        step=step,
        fps=fps,
        state_names=actions.names(state) if state else _labels(data.state_names, data[0].state, "state"),
        action_names=actions.names(action) if poses else _labels(data.action_names, data[0].action, "action"),
        action_from=convention,
        action=action,
        state_from=stored if data[0].state.shape[1] else None,
        state=state,
        want=want,
        near=None,
        meta=meta,
    )
    return replace(plan, near=_near(data, plan)) if state is not None and want.unwrap else plan


def _near(data: Dataset, plan: _Plan) -> Float64[np.ndarray, "R"]:
    """Where the rotations of the dataset lie, so that all episodes are unwrapped to the same turn."""
    assert plan.state is not None
    turns = [plan._state(data[i])[0][:, actions.turns(plan.state)] for i in range(len(data))]
    if plan.state.rotation == "euler_xyz":
        return actions.circular_mean(turns)
    return np.asarray(turns[0][0], np.float64)


def _labels(names: tuple[str, ...], rows: Float32[np.ndarray, "N D"], what: str) -> tuple[str, ...]:
    return names if len(names) == rows.shape[1] else tuple(f"{what}_{i}" for i in range(rows.shape[1]))


def _step(data: Dataset, want: Wanted) -> int:
    if want.fps is None:
        return 1
    ratio = data.fps / want.fps
    step = round(ratio)
    if step < 1 or abs(ratio - step) > 1e-6:
        raise SimForcingError(
            f"{data.root}: {data.fps:g} rows a second cannot become {want.fps:g}; give a divisor of them"
        )
    return step


def _is_pose(data: Dataset, want: Wanted) -> bool:
    """Whether states and actions are poses with a gripper. Raises SimForcingError where a change needs that."""
    episode, stored, convention = data[0], data.state_convention, data.action_convention
    acts = episode.action.shape[1] == actions.width(convention)
    if episode.state.shape[1] == 0:
        if not want.state_from_actions:
            raise SimForcingError(
                f"{data.root}: no states in it, which are needed here; --state-from-actions adds up the deltas instead"
            )
        if not acts or convention.kind != "delta":
            raise SimForcingError(f"{data.root}: its actions are no deltas of a pose, so they give no states")
        return True
    if stored is not None and acts and episode.state.shape[1] == actions.width(stored):
        return True
    if want.poses:
        raise SimForcingError(
            f"{data.root}: {', '.join(want.poses)} can only be changed of poses (xyz, rotation, gripper); states have "
            f"{episode.state.shape[1]} numbers ({', '.join(data.state_names) or 'unnamed'}), "
            f"actions {episode.action.shape[1]}"
        )
    return False
