"""The search for a camera: coordinates that suit it, likely starts, and CMA-ES.

Coordinates are taken about a pivot, the middle of where the hand moves: from where it is seen (azimuth, elevation),
how far away (log metres), how large things there appear (log focal length over distance), where it lies in the
picture (right and up of the middle, in picture heights), and the camera's roll. Most of them show in a picture at
once; what shows little, going farther away while zooming in, is a single one of them.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from simforcing.twin.camera import Camera
from simforcing.twin.robot import pose_matrix

Vector = Float64[np.ndarray, " 7"]
Goal = Callable[[Vector], float]
"""Takes coordinates, returns what is to be small."""

STEP = np.array([0.12, 0.10, 0.15, 0.10, 0.06, 0.06, 0.05])
"""One standard deviation of a wide search in each coordinate."""

_FOVY, _FOVY_SPREAD = 55.0, 15.0  # degrees; what cameras beside robots have
_ROLL_SPREAD = np.radians(10.0)
_LEVEL = np.radians(5.0)  # looking up by so much is still usual
FOVY_RANGE = (15.0, 110.0)


@dataclass(frozen=True)
class Orbit:
    """Cameras for pictures of `height` x `width` about `pivot` (base frame, metres).

    With `fovy` (degrees) the field of view is fixed, and the fourth coordinate has no effect.
    """

    pivot: Float64[np.ndarray, " 3"]
    height: int
    width: int
    fovy: float | None = None

    def camera(self, x: Vector) -> Camera:
        """The camera at coordinates `x`."""
        azimuth, elevation, log_distance, log_scale, right, up, roll = x
        distance = np.exp(np.clip(log_distance, -5.0, 5.0))
        fovy = np.clip(_fovy(np.exp(log_scale) * distance), *FOVY_RANGE) if self.fovy is None else self.fovy
        focal = _focal(float(fovy))
        back = _direction(azimuth, np.clip(elevation, -1.5, 1.5))
        upright = Camera.look_at(
            self.pivot + distance * back, self.pivot, fovy=float(fovy), height=self.height, width=self.width
        )
        turn = upright.pose[:3, :3] @ _onto_axis(np.array([right / focal, up / focal, -1.0])).T @ _about_z(roll)
        return Camera(pose_matrix(upright.pose[:3, 3], turn), float(fovy), self.height, self.width)

    def coordinates(self, camera: Camera) -> Vector:
        """Inverse of `camera`, for cameras that have the pivot before them."""
        offset = camera.pose[:3, 3] - self.pivot
        distance = float(np.linalg.norm(offset))
        azimuth, elevation = np.arctan2(offset[1], offset[0]), np.arcsin(np.clip(offset[2] / distance, -1, 1))
        focal = _focal(camera.fovy)
        upright = Camera.look_at(camera.pose[:3, 3], self.pivot, fovy=camera.fovy, height=self.height, width=self.width)
        rest = upright.pose[:3, :3].T @ camera.pose[:3, :3]
        point = rest[:, 2] * [1.0, 1.0, -1.0]  # where the pivot is seen, for turning about z leaves that column alone
        level = _onto_axis(point) @ rest
        roll = np.arctan2(level[1, 0], level[0, 0])
        right, up = -focal * point[:2] / point[2]
        return np.array([azimuth, elevation, np.log(distance), np.log(focal / distance), right, up, roll])

    def unlikely(self, camera: Camera) -> float:
        """Half the squared standard deviations by which roll, looking upwards and field of view are unusual."""
        roll, rise = np.arcsin(np.clip(camera.pose[2, [0, 2]] * [1.0, -1.0], -1.0, 1.0))
        fovy = 0.0 if self.fovy is not None else (camera.fovy - _FOVY) / _FOVY_SPREAD
        return float(0.5 * (fovy**2 + (roll / _ROLL_SPREAD) ** 2 + (max(0.0, rise - _LEVEL) / _ROLL_SPREAD) ** 2))

    def starts(self, count: int, reach: float, random: np.random.Generator) -> Float64[np.ndarray, "S 7"]:
        """Likely cameras: aimed at the surroundings of the pivot from all around, roughly upright.

        They stand 0.3 to 1.5 `reach` (metres) away from what they aim at, level with it or above.
        """
        aims = self.pivot + 0.13 * reach * random.normal(size=(count, 3))
        distances = reach * np.exp(random.uniform(np.log(0.3), np.log(1.5), count))
        azimuths, elevations = random.uniform(-np.pi, np.pi, count), np.radians(random.uniform(-5.0, 60.0, count))
        views = random.uniform(35.0, 75.0, count) if self.fovy is None else np.full(count, self.fovy)
        out = []
        for aim, distance, azimuth, elevation, fovy in zip(aims, distances, azimuths, elevations, views, strict=True):
            eye = aim + distance * _direction(azimuth, elevation)
            camera = Camera.look_at(eye, aim, fovy=float(fovy), height=self.height, width=self.width)
            if float((self.pivot - eye) @ camera.pose[:3, 2]) < -0.05 * reach:  # the pivot is before it
                out.append(self.coordinates(camera))
        rolls = np.radians(4.0) * random.normal(size=len(out))
        return np.asarray(np.stack(out) + rolls[:, None] * np.eye(7)[6])


def _fovy(focal: float) -> float:
    return float(np.degrees(2 * np.arctan(0.5 / focal)))


def _focal(fovy: float) -> float:
    """Focal length in picture heights."""
    return float(0.5 / np.tan(np.radians(fovy) / 2))


def _direction(azimuth: float, elevation: float) -> Float64[np.ndarray, " 3"]:
    flat = np.cos(elevation)
    return np.array([flat * np.cos(azimuth), flat * np.sin(azimuth), np.sin(elevation)])


def _about_z(angle: float) -> Float64[np.ndarray, "3 3"]:
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])


def _onto_axis(point: Float64[np.ndarray, " 3"]) -> Float64[np.ndarray, "3 3"]:
    """The shortest rotation that takes the viewing axis -z to the direction of `point` (z < 0)."""
    unit = point / np.linalg.norm(point)
    axis = np.cross([0.0, 0.0, -1.0], unit)
    cross = np.array([[0.0, -axis[2], axis[1]], [axis[2], 0.0, -axis[0]], [-axis[1], axis[0], 0.0]])
    return np.asarray(np.eye(3) + cross + cross @ cross / (1.0 - unit[2]))


def descend(
    goal: Goal, start: Vector, *, width: float, generations: int, population: int, seed: int, depth: float = 1.0
) -> Vector:
    """The best of a CMA-ES run from `start` with standard deviations `width * STEP`; the same for the same seed.

    `depth` multiplies that of the distance, along which pictures change least.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that its optional plotting is missing
        import cma

    options = {"popsize": population, "maxiter": generations, "seed": seed + 1, "verbose": -9, "tolfun": 1e-7}
    step = STEP * [1.0, 1.0, depth, 1.0, 1.0, 1.0, 1.0]
    run = cma.CMAEvolutionStrategy(np.zeros(len(start)), width, options)
    while not run.stop():
        asked = run.ask()
        run.tell(asked, [goal(start + step * x) for x in asked])
    return np.asarray(start + step * run.result.xbest, dtype=np.float64)


def distinct(points: Sequence[Vector], most: int, least: float = 2.0) -> list[Vector]:
    """The first `most` of `points` (best first) of which no two are within `least` STEPs of each other."""
    out: list[Vector] = []
    for x in points:
        if len(out) == most:
            break
        if all(_apart(x, other) > least for other in out):
            out.append(x)
    return out


def _apart(a: Vector, b: Vector) -> float:
    difference = a - b
    difference[0] = (difference[0] + np.pi) % (2 * np.pi) - np.pi
    return float(np.linalg.norm(difference / STEP))
