"""Scripted tasks of the bundled world: where things lie, what the arm is told, and the poses that do it.

A script is a list of `Waypoint`s; `path` turns it into one end-effector pose a frame. N frames; a row is
xyz (m), rotation vector (rad) of site `ee`, gripper opening [0, 1], in the robot base frame.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float64
from scipy.spatial.transform import Rotation

from simforcing.twin.augment import continuous
from simforcing.twin.scene import BALL, BLOCK, BLOCKS, COLOURS, PLATE_HEIGHT, Setting

GRASP = 0.022  # height of the fingertips' centre above the table when they close on a thing
DOWN = np.pi / 2  # pitch of a gripper that points straight down


@dataclass(frozen=True)
class Waypoint:
    """A pose to pass: position (m), gripper yaw and pitch (rad; pi/2 is down), opening, frames to stay."""

    pos: tuple[float, float, float]
    yaw: float
    pitch: float
    opening: float
    stay: int = 0


@dataclass(frozen=True)
class Layout:
    """Start of an episode: pose (x, y, z, yaw; metres, radians) of each thing present, and its colour."""

    places: Mapping[str, tuple[float, float, float, float]]
    colours: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """A task in words, its things and its waypoints."""

    task: str
    layout: Layout
    waypoints: tuple[Waypoint, ...]


def draw_plan(rng: np.random.Generator, chosen: Setting, frames: int) -> Plan:
    """A random task with its layout and enough waypoints to fill `frames` frames."""
    kind = str(rng.choice(list(_TASKS), p=_WEIGHTS))
    layout = _layout(rng, chosen, kind)
    task, core = _TASKS[kind](rng, chosen, layout)
    opening = core[0].opening if core else float(rng.integers(2))
    start = _wander(rng, chosen, 1, opening, low=0.10)
    end = core[-1].opening if core else None
    carry = end is not None and kind.startswith("pick")
    tail = _wander(rng, chosen, max(3, frames // 4), end, low=0.09, keep=carry)
    return Plan(task, layout, (*start, *core, *tail))


def path(
    waypoints: Sequence[Waypoint], frames: int, speed: float, tool: Float64[np.ndarray, "3 3"]
) -> Float64[np.ndarray, "N 7"]:
    """One pose a frame along the waypoints: `speed` metres, 0.2 rad or half the gripper's range a frame."""
    rows: list[Float64[np.ndarray, "6"]] = [_row(waypoints[0])]
    for before, after in pairwise(waypoints):
        start, end = _row(before), _row(after)
        change = end - start
        need = (
            np.linalg.norm(change[:3]) / speed,
            abs(change[3]) / 0.20,
            abs(change[4]) / 0.20,
            abs(change[5]) / 0.5,
        )
        count = max(1, int(np.ceil(max(need) - 0.25)))
        rows.extend(start + change * (k / count) for k in range(1, count + 1))
        rows.extend([end] * after.stay)
        if len(rows) >= frames + 2:
            break
    while len(rows) < frames + 2:
        rows.append(rows[-1])
    values = np.stack(rows[: frames + 2])
    smooth = values.copy()
    smooth[1:-1, :5] = 0.15 * values[:-2, :5] + 0.7 * values[1:-1, :5] + 0.15 * values[2:, :5]
    smooth = smooth[:frames]
    out = np.empty((frames, 7))
    out[:, :3], out[:, 6] = smooth[:, :3], np.clip(smooth[:, 5], 0.0, 1.0)
    turns = Rotation.from_euler("ZY", smooth[:, 3:5]) * Rotation.from_matrix(tool)
    out[:, 3:6] = turns.as_rotvec()
    return continuous(out)


def _row(w: Waypoint) -> Float64[np.ndarray, "6"]:
    return np.array([*w.pos, w.yaw, w.pitch, w.opening])


def _layout(rng: np.random.Generator, chosen: Setting, kind: str) -> Layout:
    """Places for the things of a task, apart and within reach; distractors keep to the rim."""
    low, high = np.array(chosen.workspace.lower), np.array(chosen.workspace.upper)
    names = ["block0"]
    names += ["block1"] if rng.random() < 0.6 else []
    names += ["ball"] if kind == "pick ball" or rng.random() < 0.4 else []
    names += ["plate"] if kind == "place" or rng.random() < 0.25 else []
    names += [str(n) for n in rng.permutation(["can", "bar"])[: int(rng.integers(1, 3))]]
    heights = {"ball": BALL, "can": 0.035, "bar": 0.012, "plate": 0.0}
    taken: list[Float64[np.ndarray, "2"]] = []
    places: dict[str, tuple[float, float, float, float]] = {}
    for name in names:
        rim = name in ("can", "bar")
        for attempt in range(200):
            spread = 0.08 if attempt < 120 else 0.055
            xy = rng.uniform(low[:2] + np.array([0.02, 0.05]), high[:2] - np.array([0.03, 0.05]))
            if rim:
                xy = np.array(
                    [
                        rng.uniform(low[0] - 0.05, high[0] + 0.08),
                        rng.uniform(0.17, 0.24) * rng.choice([-1, 1]),
                    ]
                )
            room = spread + (0.03 if "plate" in (name, *places) else 0.0)
            if all(np.linalg.norm(xy - other) > room for other in taken):
                break
        taken.append(xy)
        turn = rng.uniform(-0.5, 0.5) + (float(np.arctan2(xy[1], xy[0])) if name in BLOCKS else 0.0)
        places[name] = (float(xy[0]), float(xy[1]), heights.get(name, BLOCK), turn)
    words = [str(c) for c in rng.permutation(list(COLOURS))]
    colours = {"block0": words[0], "block1": words[1], "ball": words[int(rng.integers(3))]}
    return Layout(places, colours)


def _wander(
    rng: np.random.Generator,
    chosen: Setting,
    count: int,
    opening: float | None,
    *,
    low: float,
    keep: bool = False,
) -> list[Waypoint]:
    """Random waypoints above `low` metres, at least 12 cm apart; the gripper changes unless `keep`."""
    a, b = np.array(chosen.workspace.lower), np.array(chosen.workspace.upper)
    state = float(rng.integers(2)) if opening is None else opening
    out: list[Waypoint] = []
    for _ in range(count):
        for _attempt in range(20):
            pos = rng.uniform([a[0], a[1], low], b)
            if not out or np.linalg.norm(pos - out[-1].pos) > 0.12:
                break
        if out and not keep and rng.random() < 0.5:
            state = 1.0 - state
        azimuth = float(np.arctan2(pos[1], pos[0]))
        yaw = azimuth + float(rng.uniform(-0.55, 0.55))
        out.append(Waypoint(_xyz(pos), yaw, float(rng.uniform(*chosen.pitch)), state))
    return out


def _xyz(pos: Float64[np.ndarray, "3"]) -> tuple[float, float, float]:
    return float(pos[0]), float(pos[1]), float(pos[2])


def _approach(place: tuple[float, float, float, float]) -> float:
    """Yaw at which the fingers meet opposite faces of a block, nearest to the arm's own direction."""
    azimuth = float(np.arctan2(place[1], place[0]))
    quarter = np.pi / 2
    return place[3] + quarter * float(np.round((azimuth - place[3]) / quarter))


def _grasp(place: tuple[float, float, float, float], pitch: float, lift: float) -> list[Waypoint]:
    x, y, _, _ = place
    yaw = _approach(place)
    return [
        Waypoint((x, y, 0.12), yaw, pitch, 1.0),
        Waypoint((x, y, GRASP + 0.003), yaw, pitch, 1.0, stay=1),
        Waypoint((x, y, GRASP + 0.003), yaw, pitch, 0.0, stay=1),
        Waypoint((x, y, lift), yaw, pitch, 0.0),
    ]


def _push(rng: np.random.Generator, chosen: Setting, layout: Layout) -> tuple[str, list[Waypoint]]:
    x, y, _, _ = layout.places["block0"]
    words = {"to the left": (0.0, 1.0), "to the right": (0.0, -1.0), "forward": (1.0, 0.0)}
    options = ["to the left", "to the right"] if x > 0.75 * chosen.workspace.upper[0] else list(words)
    word = str(rng.choice(options))
    way = np.array(words[word])
    before = np.array([x, y]) - way * 0.065
    after = np.array([x, y]) + way * float(rng.uniform(0.06, 0.11))
    yaw = float(np.arctan2(y, x)) + float(rng.uniform(-0.2, 0.2))
    pitch = float(rng.uniform(1.3, 1.57))
    z = 0.026
    low, high = np.array(chosen.workspace.lower)[:2], np.array(chosen.workspace.upper)[:2]
    before, after = np.clip(before, low, high), np.clip(after, low, high)
    points = [(before, 0.10, 0), (before, z, 0), (after, z, 0), (after - 0.02 * way, 0.11, 0)]
    return (
        f"push the {layout.colours['block0']} block {word}",
        [Waypoint((float(p[0]), float(p[1]), h), yaw, pitch, 0.0, stay) for p, h, stay in points],
    )


def _pick_block(rng: np.random.Generator, chosen: Setting, layout: Layout) -> tuple[str, list[Waypoint]]:
    lift = float(rng.uniform(0.14, 0.22))
    return f"pick up the {layout.colours['block0']} block", _grasp(layout.places["block0"], DOWN, lift)


def _pick_ball(rng: np.random.Generator, chosen: Setting, layout: Layout) -> tuple[str, list[Waypoint]]:
    x, y, z, _ = layout.places["ball"]
    place = (x, y, z, float(np.arctan2(y, x)) + float(rng.uniform(-0.4, 0.4)))
    return f"pick up the {layout.colours['ball']} ball", _grasp(place, DOWN, float(rng.uniform(0.14, 0.22)))


def _place(rng: np.random.Generator, chosen: Setting, layout: Layout) -> tuple[str, list[Waypoint]]:
    x, y, _, _ = layout.places["plate"]
    yaw = float(np.arctan2(y, x))
    down = GRASP + PLATE_HEIGHT + 0.012
    core = _grasp(layout.places["block0"], DOWN, 0.10)
    core += [
        Waypoint((x, y, 0.10), yaw, DOWN, 0.0),
        Waypoint((x, y, down), yaw, DOWN, 0.0),
        Waypoint((x, y, down), yaw, DOWN, 1.0),
        Waypoint((x, y, 0.13), yaw, DOWN, 1.0),
    ]
    return f"put the {layout.colours['block0']} block on the plate", core


def _reach(rng: np.random.Generator, chosen: Setting, layout: Layout) -> tuple[str, list[Waypoint]]:
    x, y, _, _ = layout.places["block0"]
    yaw = float(np.arctan2(y, x)) + float(rng.uniform(-0.3, 0.3))
    opening = float(rng.integers(2))
    near = Waypoint((x, y, 2 * BLOCK + 0.03), yaw, float(rng.uniform(1.25, 1.57)), opening, stay=1)
    return f"reach for the {layout.colours['block0']} block", [near]


def _move(rng: np.random.Generator, chosen: Setting, layout: Layout) -> tuple[str, list[Waypoint]]:
    return "move the gripper around", []


def _signal(rng: np.random.Generator, chosen: Setting, layout: Layout) -> tuple[str, list[Waypoint]]:
    points = _wander(rng, chosen, 6, float(rng.integers(2)), low=0.06)
    toggled = [Waypoint(p.pos, p.yaw, p.pitch, float((i + int(points[0].opening)) % 2)) for i, p in enumerate(points)]
    return "open and close the gripper", toggled


_TASKS: Mapping[str, Callable[[np.random.Generator, Setting, Layout], tuple[str, list[Waypoint]]]] = {
    "push": _push,
    "pick block": _pick_block,
    "pick ball": _pick_ball,
    "place": _place,
    "reach": _reach,
    "move": _move,
    "signal": _signal,
}
_WEIGHTS = (0.28, 0.16, 0.12, 0.14, 0.10, 0.12, 0.08)
