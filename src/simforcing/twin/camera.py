"""Where a camera stands, how wide it sees, and the file that says so.

A pose is a 4x4 float64 matrix from camera to robot base frame, metres. Camera axes are MuJoCo's (and
OpenGL's): x to the right, y up, looking along -z. The picture is a pinhole's: square pixels, no distortion,
centre in the middle. Pictures may be stored mirrored, left to right (LIBERO's are).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from simforcing.errors import SimForcingError
from simforcing.files import write_text
from simforcing.twin.robot import Robot, pose_matrix

_FLIP = np.diag([1.0, -1.0, -1.0, 1.0])  # OpenCV's axes (x right, y down, looking along z) to ours, and back
_KEYS = ("pose", "axes", "fovy_degrees", "height", "width")
_LATER = ("mirrored",)  # may be missing


@dataclass(frozen=True)
class _View:
    """A default camera: eye and what it looks at (base frame), field of view in degrees."""

    eye: tuple[float, float, float]
    target: tuple[float, float, float]
    fovy: float


# In lengths of the arm: beside it on its right, a little above, looking across; whole arm and table are in
# view.
_WHOLE_ARM = _View((0.39, -1.02, 0.67), (0.32, 0.0, 0.25), 52.0)
# Metres, for Franka arms: the middle of two exterior views of DROID, whose cameras stand close.
_DROID = _View((0.17, -0.42, 0.45), (0.40, -0.15, 0.085), 64.0)
_FRANKA = ("panda", "fr3", "franka")


@dataclass(frozen=True)
class Camera:
    """A pinhole camera: `pose` [4, 4] camera to base, `fovy` vertical field of view (degrees), picture size.

    mirrored: its pictures are stored with left and right exchanged.

    Raises SimForcingError for a pose that is no rigid motion, a field of view outside 1 to 170 degrees, or no
    size.
    """

    pose: Float64[np.ndarray, "4 4"]
    fovy: float
    height: int
    width: int
    mirrored: bool = False

    def __post_init__(self) -> None:
        pose = np.asarray(self.pose, dtype=np.float64)
        if pose.shape != (4, 4) or not np.isfinite(pose).all():
            raise SimForcingError(f"camera: pose must be a finite 4x4 matrix, not {list(pose.shape)}")
        turn = pose[:3, :3]
        if not np.allclose(turn @ turn.T, np.eye(3), atol=1e-3) or np.linalg.det(turn) < 0:
            raise SimForcingError("camera: the upper left 3x3 of pose is no rotation matrix")
        if not np.allclose(pose[3], [0, 0, 0, 1]):
            raise SimForcingError(f"camera: the last row of pose is {pose[3].tolist()}; it must be 0 0 0 1")
        if not 1.0 <= self.fovy <= 170.0:
            raise SimForcingError(f"camera: fovy is {self.fovy} degrees; give 1 to 170")
        if self.height < 1 or self.width < 1:
            raise SimForcingError(f"camera: size is {self.height}x{self.width}; give positive numbers")
        if not isinstance(self.mirrored, bool):
            raise SimForcingError(f"camera: mirrored is {self.mirrored!r}; use true or false")
        object.__setattr__(self, "pose", pose)

    @classmethod
    def look_at(
        cls,
        eye: Sequence[float] | Float64[np.ndarray, " 3"],
        target: Sequence[float] | Float64[np.ndarray, " 3"],
        *,
        fovy: float,
        height: int,
        width: int,
    ) -> "Camera":
        """A camera at `eye` that looks at `target` (both metres, base frame), upright (z up)."""
        back = np.asarray(eye, dtype=np.float64) - np.asarray(target, dtype=np.float64)
        right = np.cross([0.0, 0.0, 1.0], back)
        if np.linalg.norm(right) < 1e-9:  # straight up or down: x of the base frame to the right
            right = np.array([1.0, 0.0, 0.0])
        if np.linalg.norm(back) < 1e-9:
            raise SimForcingError("camera: eye and target are the same point")
        back, right = back / np.linalg.norm(back), right / np.linalg.norm(right)
        turn = np.stack([right, np.cross(back, right), back], axis=1)
        return cls(pose_matrix(np.asarray(eye, dtype=np.float64), turn), fovy, height, width)

    def resized(self, height: int, width: int) -> "Camera":
        """The same view in another size. Raises SimForcingError where the shape differs (more than 2 %)."""
        if abs(width * self.height / (height * self.width) - 1) > 0.02:
            raise SimForcingError(
                f"camera: made for {self.height}x{self.width} pictures, but these are {height}x{width}; "
                "crop them alike, or calibrate for this camera"
            )
        return replace(self, height=height, width=width)

    def project(self, points: Float64[np.ndarray, "K 3"]) -> Float64[np.ndarray, "K 2"]:
        """Pixel (column, row) of points in the base frame (metres); nan for points behind the camera."""
        local = np.linalg.solve(self.pose, np.column_stack([points, np.ones(len(points))]).T)[:3]
        depth = np.where(local[2] < 0, -local[2], np.nan)
        focal = self.height / 2 / np.tan(np.radians(self.fovy) / 2)
        right = -local[0] if self.mirrored else local[0]
        return np.column_stack([self.width / 2 + focal * right / depth, self.height / 2 - focal * local[1] / depth])

    def to_dict(self) -> dict[str, Any]:
        """The JSON form that `from_dict` reads."""
        return {
            "pose": self.pose.tolist(),
            "axes": "opengl",
            "fovy_degrees": self.fovy,
            "height": self.height,
            "width": self.width,
            **({"mirrored": True} if self.mirrored else {}),
        }

    @classmethod
    def from_dict(cls, stored: Any) -> "Camera":
        """A camera from the keys `pose`, `axes`, `fovy_degrees`, `height`, `width`, and perhaps `mirrored`.

        `pose` is camera to base, 4x4; `axes` is `opengl`, or `opencv` (x right, y down, looking along z).
        Raises SimForcingError for missing or unknown keys and impossible values.
        """
        if not isinstance(stored, dict):
            raise SimForcingError(f"camera: expected the keys {', '.join(_KEYS)}")
        if wrong := sorted(set(_KEYS) ^ (set(stored) - set(_LATER))):
            kind = "unknown" if wrong[0] in stored else "missing"
            raise SimForcingError(f"camera: {kind} key '{wrong[0]}'; it has {', '.join(_KEYS)}")
        if stored["axes"] not in ("opengl", "opencv"):
            raise SimForcingError(f"camera: axes is {stored['axes']!r}; use opengl or opencv")
        try:
            pose = np.array(stored["pose"], dtype=np.float64)
            numbers = float(stored["fovy_degrees"]), int(stored["height"]), int(stored["width"])
        except (TypeError, ValueError) as error:
            raise SimForcingError(f"camera: a value is no number ({error})") from error
        if stored["axes"] == "opencv" and pose.shape == (4, 4):
            pose = pose @ _FLIP
        return cls(pose, *numbers, stored.get("mirrored", False))

    def save(self, path: Path) -> None:
        """Write `camera.json` at `path` (under a temporary name first)."""
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Camera":
        """Read what `save` wrote. Raises SimForcingError, naming the file, where that is not possible."""
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SimForcingError(f"camera file {path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise SimForcingError(f"camera file {path}: not JSON ({error})") from error
        try:
            return cls.from_dict(stored)
        except SimForcingError as error:
            raise SimForcingError(f"camera file {path}: {str(error).removeprefix('camera: ')}") from error


def load_cameras(path: Path) -> Camera | dict[int, Camera]:
    """What `twin calibrate` wrote to `path`: one camera, or one for each episode (`camera_000003.json`, ...).

    Raises SimForcingError where there is neither, both, or a file that is none.
    """
    each = {
        int(file.stem.removeprefix(f"{path.stem}_")): file
        for file in sorted(path.parent.glob(f"{path.stem}_{'[0-9]' * 6}{path.suffix}"))
    }
    if each and path.exists():
        raise SimForcingError(f"camera file {path}: there are also cameras of single episodes ({each[min(each)].name})")
    return {number: Camera.load(file) for number, file in each.items()} if each else Camera.load(path)


def default_camera(robot: Robot, width: int, height: int) -> Camera:
    """A guess where no camera file is given.

    Most arms are seen whole from their right side, at a distance that scales with the arm. Franka arms are
    seen as DROID's exterior cameras see them, from close by, with base and hand in view. It is no
    calibration: simulated and real pictures move alike but do not lie on each other.
    """
    names = (robot.name, robot.joint_names[0])
    franka = any(word in name.lower() for name in names for word in _FRANKA)
    view, scale = (_DROID, 1.0) if franka else (_WHOLE_ARM, robot.length)
    eye, target = (tuple(scale * np.array(point)) for point in (view.eye, view.target))
    return Camera.look_at(eye, target, fovy=view.fovy, height=height, width=width)
