"""Whether recordings of LIBERO are what policies and the evaluation take them for: cameras, rate, numbers, orientation.

Legend: N frames, H W pixels, h w small pixels.

Orientation is measured, not believed. The agent view looks at the robot from the front, so what moves in the picture
goes with the hand: up where it goes up, and to the right where it goes to the robot's left (+y). A picture that stands
on its head or is mirrored turns the sign of one of the two. In the wrist view the scene moves against the hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from simforcing.data.episode import Dataset
from simforcing.errors import SimForcingError
from simforcing.policy.libero_env import AGENT, HZ, WRIST
from simforcing.policy.libero_numbers import GRIPPER

Array = np.ndarray[Any, np.dtype[Any]]
NAMES = {
    AGENT: ("image", "agentview", "agentview_rgb", "agentview_image", "front"),
    WRIST: ("wrist_image", "image2", "wrist", "eye_in_hand_rgb", "robot0_eye_in_hand", "wrist_rgb"),
}
"""What the two cameras are called, after `observation.images.`, in public sets."""
SMALL = 32
"""Pixels of a side to which pictures are averaged before motion is looked for."""


@dataclass(frozen=True)
class Orientation:
    """How pictures lie: upside down, mirrored left to right; `frames` moved enough to tell.

    strength: how well the hand's place explains where motion is seen, 0 (not at all) to 1, vertically, horizontally.
    """

    upside_down: bool
    mirrored: bool
    frames: int
    strength: tuple[float, float]

    def __str__(self) -> str:
        words = [word for word, is_so in (("upside down", self.upside_down), ("mirrored", self.mirrored)) if is_so]
        return " and ".join(words) or "as seen"


def camera_roles(cameras: Sequence[str]) -> dict[str, str]:
    """Key in a dataset or of a policy -> `AGENT` or `WRIST`.

    Raises:
        SimForcingError: a camera is neither, or two are the same.
    """
    roles = {}
    for key in cameras:
        name = key.removeprefix("observation.images.").removeprefix("observation.")
        meant = [role for role, names in NAMES.items() if name in names]
        if not meant:
            known = "; ".join(", ".join(names) for names in NAMES.values())
            raise SimForcingError(f"camera {key!r} is none of LIBERO's ({known}); rename it")
        roles[key] = meant[0]
    if len(set(roles.values())) < len(roles):
        raise SimForcingError(f"cameras {', '.join(cameras)}: two of them show the same view; leave one out")
    return roles


def left_to_right(cameras: Sequence[str]) -> tuple[str, ...]:
    """LIBERO's cameras, the agent view first, as its policies see them."""
    roles, order = camera_roles(cameras), list(NAMES)
    return tuple(sorted(cameras, key=lambda key: order.index(roles[key])))


def are_liberos(dataset: Dataset) -> bool:
    """Whether a dataset looks like recordings of LIBERO: both of its cameras, by name, and its numbers of an action."""
    try:
        roles = camera_roles(dataset.cameras)
    except SimForcingError:
        return False
    return set(roles.values()) == set(NAMES) and len(dataset) > 0 and dataset[0].action.shape[1] == GRIPPER + 1


def unlike_recordings(low: Float[Array, "7"], high: Float[Array, "7"]) -> str:
    """In what actions between these numbers differ from recorded ones; empty where they do not."""
    motion, slack = (low[:GRIPPER].min(), high[:GRIPPER].max()), 0.05
    if motion[0] < -1 - slack or motion[1] > 1 + slack:
        return f"motion goes from {motion[0]:.3g} to {motion[1]:.3g}, in LIBERO's recordings from -1 to 1"
    if low[GRIPPER] < -slack or high[GRIPPER] > 1 + slack:
        return (
            f"the gripper goes from {low[GRIPPER]:.3g} to {high[GRIPPER]:.3g}, in LIBERO's recordings from 0 (closed) "
            "to 1 (open)"
        )
    return ""


def check_recordings(dataset: Dataset, episodes: int = 4) -> dict[str, str]:
    """What is wrong with recordings of LIBERO, by what: `cameras`, `rate`, `state`, `action`, `orientation`; else {}.

    Pictures must be upright and mirrored, as the evaluation shows them; that is measured of the agent view, since the
    wrist view moves with the hand. `episodes`: how many are looked at.
    """
    found: dict[str, str] = {}
    try:
        roles = camera_roles(dataset.cameras)
    except SimForcingError as error:
        return {"cameras": str(error)}
    if set(roles.values()) != set(NAMES):
        found["cameras"] = f"there is only {', '.join(dataset.cameras)}, of agent view and wrist view"
    if dataset.fps != HZ:
        found["rate"] = f"{dataset.fps:g} frames a second, LIBERO has {HZ}"
    first = [dataset[i] for i in range(min(episodes, len(dataset)))]
    for name, width in (("state", 8), ("action", GRIPPER + 1)):
        widths = {getattr(episode, name).shape[1] for episode in first}
        if widths != {width}:
            found[name] = f"{name} has {', '.join(map(str, sorted(widths)))} numbers, LIBERO's {width}"
    if "action" not in found:
        action = np.concatenate([episode.action for episode in first])
        if unlike := unlike_recordings(action.min(0), action.max(0)):
            found["action"] = unlike
    agent = next((key for key, role in roles.items() if role == AGENT), None)
    if agent is not None and "state" not in found:
        try:
            lies = agent_orientation([(episode.frames(agent), episode.state[:, :3]) for episode in first])
        except SimForcingError as error:
            found["orientation"] = str(error)
        else:
            if lies.upside_down or not lies.mirrored:
                found["orientation"] = (
                    f"pictures of {agent} are {lies}, LIBERO's recordings are mirrored, not upside down"
                )
    return found


def agent_orientation(
    episodes: Sequence[tuple[UInt8[Array, "N H W 3"], Float[Array, "N 3"]]],
) -> Orientation:
    """How the agent view lies, from pictures and the hand's places in metres.

    Raises:
        SimForcingError: too little moves to tell.
    """
    places, seen = [], []
    for frames, hand in episodes:
        rows, columns, moving = moving_point(frames)
        middle = (hand[1:] + hand[:-1]) / 2
        places.append((middle - middle.mean(0))[moving])
        seen.append(np.stack([rows, columns], axis=1)[moving])
    hands, points = np.concatenate(places), np.concatenate(seen)
    if len(hands) < 20 or hands.std(0).min() < 0.005:
        raise SimForcingError(f"orientation: the hand moves in {len(hands)} frames only, or along a line; give more")
    points = points - points.mean(0)
    slopes, *_ = np.linalg.lstsq(hands, points, rcond=None)
    rest = ((points - hands @ slopes) ** 2).sum(0) / (points**2).sum(0)
    return Orientation(
        upside_down=bool(slopes[2, 0] > 0),
        mirrored=bool(slopes[1, 1] < 0),
        frames=len(hands),
        strength=(float(np.sqrt(1 - rest[0])), float(np.sqrt(1 - rest[1]))),
    )


def moving_point(frames: UInt8[Array, "N H W 3"]) -> tuple[Float[Array, "M"], Float[Array, "M"], Array]:
    """Row and column, in [0, 1], around which each frame differs from the one before; where enough does (M = N - 1)."""
    small = _averaged(frames)
    change = np.abs(np.diff(small, axis=0))
    change = np.where(change > 4.0, change, 0.0)
    weight = change.sum((1, 2))
    grid = (np.arange(SMALL) + 0.5) / SMALL
    total = np.maximum(weight, 1e-9)
    return (change.sum(2) @ grid) / total, (change.sum(1) @ grid) / total, weight > 40.0


def _averaged(frames: UInt8[Array, "N H W 3"]) -> Float[Array, "N h w"]:
    """Grey pictures of `SMALL` pixels a side."""
    count, height, width = frames.shape[:3]
    step_h, step_w = height // SMALL, width // SMALL
    if min(step_h, step_w) < 1:
        raise SimForcingError(f"pictures of {height} x {width} pixels are too small to look for motion")
    cut = frames[:, : step_h * SMALL, : step_w * SMALL].astype(np.float32).mean(3)
    return np.asarray(cut.reshape(count, SMALL, step_h, SMALL, step_w).mean((2, 4)))


def by_role(images: Mapping[str, Array], roles: Mapping[str, str]) -> dict[str, Array]:
    """LIBERO's pictures under the keys of a dataset or policy."""
    return {key: images[role] for key, role in roles.items()}
