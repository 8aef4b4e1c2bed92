"""Where a gripper can take a thing, from the boxes that a simulation consists of.

Legend: K boxes. Metres and radians, world axes, z up. The gripper points down; `yaw` is the direction in which its
fingers close, seen from above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from simforcing.errors import SimForcingError
from simforcing.policy.libero_env import Libero

Array = np.ndarray[Any, np.dtype[Any]]
WIDEST = 0.072
"""What fits between open fingers."""
FINGER = 0.012
"""Half the side of a finger, and how far its tip is below the point that the state gives."""
PALM = 0.045
"""How far the hand's lower side is above that point."""
HAND = (0.10, 0.032)
"""Half the hand's size, along the fingers' way and across it."""
_SIGNS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float64)


@dataclass(frozen=True)
class Grasp:
    """Where the gripper closes, and in which direction."""

    place: Float[Array, "3"]
    yaw: float


class Bodies:
    """The things of a running task: their places and shapes now."""

    def __init__(self, environment: Libero) -> None:
        task = environment.control.env
        self._model, self._data = task.sim.model._model, task.sim.data._data
        self._bodies: Mapping[str, int] = task.obj_body_id
        self._geoms = {name: self._solid(body) for name, body in self._bodies.items()}
        self._grip = self._model.site("gripper0_grip_site").id
        self.names = tuple(self._bodies)

    def _solid(self, body: int) -> list[int]:
        """Geoms that others collide with, of a body and all that hangs on it."""
        model, below = self._model, {body}
        for child in range(body + 1, model.nbody):
            if model.body_parentid[child] in below:
                below.add(child)
        solid = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
        return [g for g in range(model.ngeom) if solid[g] and model.geom_bodyid[g] in below]

    def place(self, name: str) -> Float[Array, "3"]:
        """A thing's origin, or that of a marked region."""
        if name in self._bodies:
            return np.array(self._data.xpos[self._bodies[name]])
        return np.array(self._data.site(name).xpos)

    def boxes(self, name: str) -> Float[Array, "K 8 3"]:
        """Corners of the boxes around a thing's parts."""
        geoms = self._geoms[name]
        local = self._model.geom_aabb[geoms][:, None, :3] + self._model.geom_aabb[geoms][:, None, 3:] * _SIGNS
        turn = self._data.geom_xmat[geoms].reshape(-1, 3, 3)
        return np.asarray(np.einsum("kij,knj->kni", turn, local) + self._data.geom_xpos[geoms][:, None])

    def others(self, *names: str) -> Float[Array, "K 8 3"]:
        """Boxes of all things but these."""
        return np.concatenate([self.boxes(name) for name in self.names if name not in names])

    def bottom(self, name: str) -> float:
        """Height of a thing's lowest point."""
        return float(self.boxes(name)[..., 2].min())

    def gripper(self) -> tuple[Float[Array, "3"], Float[Array, "3 3"]]:
        """Place and axes (columns: where fingers close, aside, down) of the gripper."""
        return np.array(self._data.site_xpos[self._grip]), np.array(self._data.site_xmat[self._grip]).reshape(3, 3)


def find_grasp(bodies: Bodies, name: str, yaw: float, rng: np.random.Generator) -> Grasp:
    """A grasp of a thing from above, near to the gripper's yaw and clear of other things.

    What is too wide for the gripper is taken by its rim. Which of the good grasps it is, is drawn.

    Raises:
        SimForcingError: nothing about the thing can be held.
    """
    boxes = bodies.boxes(name)
    top, bottom = float(boxes[..., 2].max()), float(boxes[..., 2].min())
    height = max(bottom + 0.014, top - 0.034)
    level = boxes[(boxes[..., 2].min(1) < height + 0.01) & (boxes[..., 2].max(1) > height - 0.01)].reshape(-1, 3)
    found = _across(level[:, :2], height) or _rim(boxes)
    if not found:
        raise SimForcingError(f"{name}: is nowhere narrower than {100 * WIDEST:.0f} cm, and has no rim")
    around = bodies.others(name)
    cost = [abs(turned(grasp.yaw, yaw)) + 10.0 * _touched(grasp, around) for grasp in found]
    order = np.argsort(np.asarray(cost) + rng.uniform(0.0, 0.15, len(cost)))
    return found[int(order[0])]


def turned(yaw: float, current: float) -> float:
    """The shortest turn to a yaw; fingers that have changed places are the same."""
    return float((yaw - current + np.pi / 2) % np.pi - np.pi / 2)


def _across(points: Float[Array, "N 2"], height: float) -> list[Grasp]:
    """Around the whole thing, where it is narrow enough."""
    found = []
    for yaw in np.linspace(0.0, np.pi, 36, endpoint=False):
        axes = np.array([[np.cos(yaw), np.sin(yaw)], [-np.sin(yaw), np.cos(yaw)]])
        along = points @ axes.T
        low, high = along.min(0), along.max(0)
        if high[0] - low[0] <= WIDEST:
            found.append((high[0] - low[0], Grasp(np.append((low + high) / 2 @ axes, height), float(yaw))))
    narrow = min((width for width, _ in found), default=0.0)
    return [grasp for width, grasp in found if width < narrow + 0.008]


def _rim(boxes: Float[Array, "K 8 3"]) -> list[Grasp]:
    """At the upper edge of a round thing, which may stand askew, one finger inside."""
    tops = boxes[..., 2].max(1)
    upper = tops > tops.max() - 0.025
    edge, tops = boxes[upper].mean(1)[:, :2], tops[upper]
    away = edge - (edge.min(0) + edge.max(0)) / 2
    if len(edge) < 8 or np.linalg.norm(away, axis=1).min() < 0.02:
        return []
    yaws = np.arctan2(away[:, 1], away[:, 0])
    return [Grasp(np.append(at, top - 0.018), float(yaw)) for at, top, yaw in zip(edge, tops, yaws, strict=True)]


def _touched(grasp: Grasp, around: Float[Array, "K 8 3"]) -> int:
    """How many boxes fingers and hand would touch at a grasp, fingers open."""
    axis = np.array([np.cos(grasp.yaw), np.sin(grasp.yaw)])
    height = float(grasp.place[2])
    parts = [
        (grasp.place[:2] + 0.052 * axis, (FINGER + 0.008, FINGER + 0.004), height - FINGER),
        (grasp.place[:2] - 0.052 * axis, (FINGER + 0.008, FINGER + 0.004), height - FINGER),
        (grasp.place[:2], HAND, height + PALM),
    ]
    return sum(int(reaches(around, middle, axis, half, lowest).sum()) for middle, half, lowest in parts)


def reaches(
    boxes: Float[Array, "K 8 3"],
    middle: Float[Array, "2"],
    axis: Float[Array, "2"],
    half: Sequence[float],
    lowest: float,
) -> Array:
    """Which boxes are higher than `lowest` within a rectangle around `middle` (by its own axes: a little generous)."""
    axes = np.stack([axis, np.array([-axis[1], axis[0]])])
    flat = (boxes[..., :2] - middle) @ axes.T
    beside = (flat.min(1) > half).any(1) | (flat.max(1) < -np.asarray(half)).any(1)
    return np.asarray(~beside & (boxes[..., 2].max(1) > lowest))


def clear_height(around: Float[Array, "K 8 3"], start: Float[Array, "3"], end: Float[Array, "3"]) -> float:
    """Height of the highest thing that a hand on its way from one place to another passes over; -inf for none."""
    way = end[:2] - start[:2]
    length = float(np.linalg.norm(way))
    axis = way / length if length > 1e-6 else np.array([1.0, 0.0])
    half = (length / 2 + 0.05, 0.06)
    passed = around[reaches(around, (start[:2] + end[:2]) / 2, axis, half, -np.inf)]
    return float(passed[..., 2].max()) if len(passed) else -np.inf
