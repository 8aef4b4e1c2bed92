"""What every reader returns: episodes with lazily decoded pictures, and the convention of their actions.

Shapes: N rows (frames) of an episode, S state width, A action width, n frames asked for, H W picture size.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from jaxtyping import Float32, Float64, UInt8

from simforcing.errors import SimForcingError

REAL = "observation.images.real"
"""Camera key of the real view in a paired dataset."""

SIM = "observation.images.sim"
"""Camera key of the simulated view in a paired dataset."""

_CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": ("absolute", "delta"),
    "relative_to": ("state", "target", None),
    "frame": ("base", "tool"),
    "rotation": ("rotvec", "euler_xyz", "quaternion"),
    "gripper": ("open_positive", "closed_positive"),
    "position_unit": ("m", "cm", "mm"),
    "angle_unit": ("rad", "deg"),
}

# Left out of stored conventions where they have these values.
_LATER = {
    "position_unit": "m",
    "angle_unit": "rad",
    "position_scale": 1.0,
    "angle_scale": 1.0,
    "fingers": False,
    "base": (0.0,) * 6,
}

Rotation = Literal["rotvec", "euler_xyz", "quaternion"]
Gripper = Literal["open_positive", "closed_positive"]
PositionUnit = Literal["m", "cm", "mm"]
AngleUnit = Literal["rad", "deg"]


def nearest(name: str, known: Iterable[str]) -> str:
    """End of an error message: the known name that is closest to a wrong one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"


@dataclass(frozen=True)
class ActionConvention:
    """What the numbers of an action mean; stored in `meta/simforcing.json` under `action`.

    kind: `absolute` = target pose at the next frame, so that action[i] leads frame i to frame i + 1; `delta`
    = change.
    relative_to: for `delta`, the pose that is changed: the measured `state` or the previous `target`.
    frame: axes of the change or pose, the robot's `base` or the `tool`.
    rotation: `rotvec` (axis times angle), `euler_xyz` (R = Rz(yaw) Ry(pitch) Rx(roll)) or `quaternion` (x y z w).
    gripper: sign of the last number; its values lie in `gripper_range`.
    hz: actions a second. position_unit, angle_unit: of the first three numbers, and of rotvec and Euler angles.
    position_scale, angle_scale: so many units is a stored 1, where a controller takes shares of its greatest step.
    """

    kind: Literal["absolute", "delta"] = "absolute"
    relative_to: Literal["state", "target"] | None = None
    frame: Literal["base", "tool"] = "base"
    rotation: Rotation = "rotvec"
    gripper: Gripper = "open_positive"
    gripper_range: tuple[float, float] = (0.0, 1.0)
    hz: float = 5.0
    position_unit: PositionUnit = "m"
    angle_unit: AngleUnit = "rad"
    position_scale: float = 1.0
    angle_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_choices("action", self)
        if self.kind == "delta" and self.relative_to is None:
            raise SimForcingError("action convention: a delta needs relative_to = state or target")
        if not self.hz > 0:
            raise SimForcingError(f"action convention: hz is {self.hz}; give a positive rate")
        for name in ("position_scale", "angle_scale"):
            if not getattr(self, name) > 0:
                raise SimForcingError(f"action convention: {name} is {getattr(self, name)}; give a positive number")
        _check_range("action", self.gripper_range)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form. Units that are metres and radians are left out, as in files from before they were named."""
        return _stored(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> ActionConvention:
        """Inverse of `to_dict`. Raises SimForcingError for an unknown key (with the nearest one) or value."""
        return cls(**_restored("action", cls, stored))


@dataclass(frozen=True)
class StateConvention:
    """What the numbers of a state mean where it is a pose: xyz, rotation, gripper; as in `ActionConvention`.

    Stored in `meta/simforcing.json` under `state`. A pose is that of the end effector in the robot's base frame.
    fingers: the gripper is two numbers, where each finger is on their common axis (LIBERO, robosuite); open is apart,
    and `gripper_range` is of their distance.
    base: where the robot's base stands in the frame that stored poses are of: xyz (metres), rotation vector (radians).
        Actions in the frame `base` are along the axes of the robot's base all the same, absolute ones seen from it.
    """

    rotation: Rotation = "rotvec"
    gripper: Gripper = "open_positive"
    gripper_range: tuple[float, float] = (0.0, 1.0)
    position_unit: PositionUnit = "m"
    angle_unit: AngleUnit = "rad"
    fingers: bool = False
    base: tuple[float, float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        _check_choices("state", self)
        _check_range("state", self.gripper_range)
        if not isinstance(self.fingers, bool):
            raise SimForcingError(f"state convention: fingers is {self.fingers!r}; use true or false")
        if self.fingers and self.gripper != "open_positive":
            raise SimForcingError("state convention: fingers are open where they are apart; gripper = open_positive")
        if self.fingers and self.gripper_range == (0.0, 1.0):
            raise SimForcingError("state convention: fingers need gripper_range, their distance closed and open")
        if np.shape(self.base) != (6,) or not np.isfinite(self.base).all():
            raise SimForcingError(f"state convention: base is {self.base}; give xyz and a rotation vector")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, units as in `ActionConvention.to_dict`."""
        return _stored(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> StateConvention:
        """Inverse of `to_dict`. Raises SimForcingError for an unknown key (with the nearest one) or value."""
        return cls(**_restored("state", cls, stored))


def _check_choices(what: str, convention: ActionConvention | StateConvention) -> None:
    for entry in fields(convention):
        choices, value = _CHOICES.get(entry.name), getattr(convention, entry.name)
        if choices is not None and value not in choices:
            listed = ", ".join(str(choice) for choice in choices)
            raise SimForcingError(f"{what} convention: {entry.name} is {value!r}; use one of {listed}")


def _check_range(what: str, span: tuple[float, float]) -> None:
    low, high = span
    if not low < high:
        raise SimForcingError(f"{what} convention: gripper_range is {low} to {high}; give the smaller value first")


def _stored(convention: ActionConvention | StateConvention) -> dict[str, Any]:
    values = asdict(convention)
    kept = {name: value for name, value in values.items() if name not in _LATER or value != _LATER[name]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}


def _restored(
    what: str, kind: type[ActionConvention] | type[StateConvention], stored: Mapping[str, Any]
) -> dict[str, Any]:
    known = {entry.name for entry in fields(kind)}
    for name in stored:
        if name not in known:
            raise SimForcingError(f"{what} convention: no key {name!r}; {nearest(name, known)}")
    values = dict(stored)
    if "gripper_range" in values:
        pair = values["gripper_range"]
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise SimForcingError(f"{what} convention: gripper_range is {pair!r}; give two numbers")
        values["gripper_range"] = (float(pair[0]), float(pair[1]))
    for name in {"hz", "position_scale", "angle_scale"} & set(values):
        values[name] = float(values[name])
    if "base" in values:
        base = values["base"]
        if not isinstance(base, (list, tuple)) or any(type(number) not in (int, float) for number in base):
            raise SimForcingError(f"{what} convention: base is {base!r}; give six numbers")
        values["base"] = tuple(float(number) for number in base)
    return values


@dataclass(frozen=True)
class Episode:
    """One recorded episode. Numbers are in memory, pictures are decoded when asked for.

    state, action: stored units, float32. timestamps: seconds from the episode's first frame.
    where: how error messages name it ("episode 3 of <path>").
    """

    index: int
    fps: float
    task: str
    cameras: tuple[str, ...]
    state: Float32[np.ndarray, "N S"]
    action: Float32[np.ndarray, "N A"]
    timestamps: Float64[np.ndarray, "N"]
    where: str
    decode: Callable[[int, str, list[int]], UInt8[np.ndarray, "n H W 3"]] = field(repr=False, compare=False)

    @property
    def length(self) -> int:
        """Number of rows, which is also the number of frames of every camera."""
        return len(self.timestamps)

    def frames(self, camera: str, indices: Sequence[int] | slice | None = None) -> UInt8[np.ndarray, "n H W 3"]:
        """RGB frames of one camera in the order asked for (None: all of them); only these are decoded.

        Raises SimForcingError for an unknown camera (with the nearest name), an index outside 0..length-1
        (negative ones included), or a video file that is missing or damaged.
        """
        if camera not in self.cameras:
            raise SimForcingError(f"{self.where}: no camera {camera!r}; {nearest(camera, self.cameras)}")
        if indices is None:
            rows = list(range(self.length))
        elif isinstance(indices, slice):
            first, last = indices.start or 0, self.length if indices.stop is None else indices.stop
            rows = list(range(first, last, 1 if indices.step is None else indices.step))
        else:
            rows = [int(i) for i in indices]
        for row in rows:
            if not 0 <= row < self.length:
                raise SimForcingError(f"{self.where}: frame {row} is outside its frames 0 to {self.length - 1}")
        return self.decode(self.index, camera, rows)


class NoSuchEpisode(SimForcingError, IndexError):
    """An episode number outside the dataset; an IndexError too, as every sequence raises."""


class Dataset(Sequence[Episode]):
    """Episodes of one dataset, whatever its format; a reader passes `load`, which makes one episode by
    number.

    lengths and tasks (one an episode) are known without loading anything. meta is `meta/simforcing.json` ({}
    if there is none). state_names and action_names are empty where the dataset has none.
    """

    def __init__(
        self,
        root: Path,
        *,
        fps: float,
        robot: str,
        cameras: tuple[str, ...],
        action_convention: ActionConvention,
        meta: dict[str, Any],
        lengths: Sequence[int],
        tasks: Sequence[str],
        state_names: tuple[str, ...],
        action_names: tuple[str, ...],
        load: Callable[[int], Episode],
        state_convention: StateConvention | None = None,
        skipped: Sequence[tuple[int, str]] = (),
        format: str = "",
    ) -> None:
        self.root = root
        self.fps = fps
        self.robot = robot
        self.cameras = cameras
        self.action_convention = action_convention
        self.meta = meta
        self.lengths = tuple(lengths)
        self.tasks = tuple(tasks)
        self.state_names = state_names
        self.action_names = action_names
        self.state_convention = state_convention
        self.skipped = tuple(skipped)
        self.format = format
        self._load = load

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> list[Episode]: ...
    def __getitem__(self, index: int | slice) -> Episode | list[Episode]:
        if isinstance(index, slice):
            return [self._load(i) for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise NoSuchEpisode(f"{self.root}: no episode {index}, it has {len(self)} (0 to {len(self) - 1})")
        return self._load(position)
