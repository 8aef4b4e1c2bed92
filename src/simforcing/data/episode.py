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
    "rotation": ("rotvec", "euler_xyz"),
    "gripper": ("open_positive", "closed_positive"),
}


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
    rotation: `rotvec` (axis times angle, radians) or `euler_xyz` (R = Rz(yaw) Ry(pitch) Rx(roll), radians).
    gripper: sign of the last number; its values lie in `gripper_range`.
    hz: actions a second.
    """

    kind: Literal["absolute", "delta"] = "absolute"
    relative_to: Literal["state", "target"] | None = None
    frame: Literal["base", "tool"] = "base"
    rotation: Literal["rotvec", "euler_xyz"] = "rotvec"
    gripper: Literal["open_positive", "closed_positive"] = "open_positive"
    gripper_range: tuple[float, float] = (0.0, 1.0)
    hz: float = 5.0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                listed = ", ".join(str(choice) for choice in choices)
                raise SimForcingError(f"action convention: {name} is {value!r}; use one of {listed}")
        if self.kind == "delta" and self.relative_to is None:
            raise SimForcingError("action convention: a delta needs relative_to = state or target")
        if not self.hz > 0:
            raise SimForcingError(f"action convention: hz is {self.hz}; give a positive rate")
        low, high = self.gripper_range
        if not low < high:
            raise SimForcingError(f"action convention: gripper_range is {low} to {high}; give the smaller value first")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**asdict(self), "gripper_range": list(self.gripper_range)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> ActionConvention:
        """Inverse of `to_dict`. Raises SimForcingError for an unknown key (with the nearest one) or value."""
        known = {entry.name for entry in fields(cls)}
        for name in stored:
            if name not in known:
                raise SimForcingError(f"action convention: no key {name!r}; {nearest(name, known)}")
        values = dict(stored)
        if "gripper_range" in values:
            pair = values["gripper_range"]
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise SimForcingError(f"action convention: gripper_range is {pair!r}; give two numbers")
            values["gripper_range"] = (float(pair[0]), float(pair[1]))
        if "hz" in values:
            values["hz"] = float(values["hz"])
        return cls(**values)


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
