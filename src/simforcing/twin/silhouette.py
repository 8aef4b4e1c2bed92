"""Where a robot's moving links are in the picture: fast from surface points, exact from the renderer.

Legend: T frames, P pairs of frames, K points, n arm joints, H W mask size. Points in the robot base frame, metres;
masks are true where a moving link is. Links that stand still through all frames are left out: no motion in a
video shows them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mujoco
import numpy as np
from jaxtyping import Bool, Float32, Float64, Int

from simforcing.errors import SimForcingError
from simforcing.twin.camera import Camera
from simforcing.twin.render import ArmRenderer
from simforcing.twin.robot import Robot

Draw = Callable[[int], Float64[np.ndarray, "k 3"]]

_STILL = 0.01  # metres: links that move less through all frames count as still
_NEAR = 0.03  # metres: points closer to the camera plane are not drawn
_SHIFT = 1.5  # pixels
_THIN = 4  # every so many points show what has shifted, in pixels of twice the size
_CENTRAL = 0.3  # pixels: points farther from a pixel's middle do not fill it
_GAPS = (1.3, 2.6)  # points farther apart than so many pixels are drawn into pixels of twice, four times the size
_MARGIN = 4  # pixels around the picture, so that closing gaps works at its border
_LEAST_POINTS = 12  # of a shape, however small
_HIDDEN = 5  # a geom group that `ArmRenderer` does not draw


class ArmSurface:
    """Random points, about `spacing` metres apart, on every shape of a robot that `renderer` shows.

    Raises SimForcingError for a robot without shapes. The same seed gives the same points.
    """

    def __init__(self, renderer: ArmRenderer, spacing: float, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.robot, self._model = renderer.robot, renderer.model
        self._data = mujoco.MjData(self._model)
        self.geoms = [g for g in range(self._model.ngeom) if self._model.geom_group[g] != _HIDDEN]
        self._local = []
        for geom in self.geoms:
            area, draw = _surface(self._model, geom, random)
            self._local.append(draw(max(_LEAST_POINTS, round(area / spacing**2))))
        if not self._local:
            raise SimForcingError(f"robot {self.robot.source}: nothing to see; its model has no shapes")

    def at(
        self, q: Float64[np.ndarray, "T n"], opening: Float64[np.ndarray, " T"], geoms: Sequence[int] | None = None
    ) -> Float32[np.ndarray, "T K 3"]:
        """The points at joints `q`, gripper `opening`; only those of `geoms` where given."""
        base = self._model.body(self.robot.base_name).id
        chosen = [(g, p) for g, p in zip(self.geoms, self._local, strict=True) if geoms is None or g in geoms]
        out = np.empty((len(q), sum(len(points) for _, points in chosen), 3), np.float32)
        for t, (row, part) in enumerate(zip(q, opening, strict=True)):
            self.robot.set_joints(self._data, row, float(part))
            turn, origin = self._data.xmat[base].reshape(3, 3), self._data.xpos[base]
            world = [p @ self._data.geom_xmat[g].reshape(3, 3).T + self._data.geom_xpos[g] for g, p in chosen]
            out[t] = (np.concatenate(world) - origin) @ turn
        return out

    def moving(self, q: Float64[np.ndarray, "T n"], opening: Float64[np.ndarray, " T"]) -> list[int]:
        """Geoms of which some point moves by more than a centimetre along an axis."""
        points, start, out = self.at(q, opening), 0, []
        for geom, local in zip(self.geoms, self._local, strict=True):
            if np.ptp(points[:, start : start + len(local)], axis=0).max() > _STILL:
                out.append(geom)
            start += len(local)
        return out


@dataclass(frozen=True)
class Silhouettes:
    """Masks of frames, and of pairs of frames: where the first frame's mask shows a surface that is elsewhere in the
    second one, by more than `_SHIFT` pixels.
    """

    masks: Bool[np.ndarray, "T H W"]
    shifted: Bool[np.ndarray, "P H W"]


def splat(
    points: Float32[np.ndarray, "T K 3"],
    spacing: float,
    camera: Camera,
    height: int,
    width: int,
    pairs: Int[np.ndarray, "P 2"],
) -> Silhouettes:
    """Silhouettes of points about `spacing` metres apart, gaps between neighbours closed."""
    frames, count = points.shape[:2]
    focal = np.float32(height / 2 / np.tan(np.radians(camera.fovy) / 2))
    eye, turn = camera.pose[:3, 3].astype(np.float32), camera.pose[:3, :3].astype(np.float32)
    local = (points.reshape(-1, 3) - eye) @ turn
    depth = -local[:, 2]
    seen = depth > _NEAR
    depth[~seen] = 1.0
    scale = (focal / depth).reshape(frames, count)  # pixels a metre
    column = _MARGIN + width / 2 + scale * local[:, 0].reshape(frames, count)
    row = _MARGIN + height / 2 - scale * local[:, 1].reshape(frames, count)
    canvas = _Canvas(height, width)
    seen = seen.reshape(frames, count) & canvas.inside(row, column)
    rows, columns = np.where(seen, row, 0).astype(np.int32), np.where(seen, column, 0).astype(np.int32)
    central = (np.abs(row % 1 - 0.5) < _CENTRAL) & (np.abs(column % 1 - 0.5) < _CENTRAL)
    masks = canvas.filled(rows, columns, central, 0)
    for level, least in enumerate(_GAPS, start=1):
        near = seen & (scale * np.float32(spacing) > least)
        touched = near.any(axis=1)
        if touched.any():
            masks[touched] |= canvas.filled(rows[touched], columns[touched], near[touched], level)
    (one, two), thin = pairs.T, (slice(None), slice(None, None, _THIN))
    row, column, rows, columns = row[thin], column[thin], rows[thin], columns[thin]
    moved = (np.abs(column[one] - column[two]) > _SHIFT) | (np.abs(row[one] - row[two]) > _SHIFT)
    return Silhouettes(masks, canvas.filled(rows[one], columns[one], moved, 1))


class _Canvas:
    """Masks with a margin, whose first pixel stands for `nowhere`; level 1 has pixels of twice the size, 2 of four
    times, in which points that are far apart still touch.
    """

    def __init__(self, height: int, width: int) -> None:
        self._crop = (slice(None), slice(_MARGIN, _MARGIN + height), slice(_MARGIN, _MARGIN + width))
        self._rows, self._columns = (-(-(n + 2 * _MARGIN) // 4) * 4 for n in (height, width))

    def inside(self, row: Float32[np.ndarray, "T K"], column: Float32[np.ndarray, "T K"]) -> Bool[np.ndarray, "T K"]:
        """Which corners of triangles lie on the canvas, margin included."""
        return np.asarray((row >= 0) & (row < self._rows) & (column >= 0) & (column < self._columns))

    def filled(
        self,
        row: Int[np.ndarray, "N K"],
        column: Int[np.ndarray, "N K"],
        which: Bool[np.ndarray, "N K"],
        level: int,
    ) -> Bool[np.ndarray, "N H W"]:
        """Masks of the cells that `which` chooses; those next to each other are joined."""
        rows, columns = self._rows >> level, self._columns >> level
        where = np.where(which, (row >> level) * np.int32(columns) + (column >> level), 0)
        where += (np.arange(len(row), dtype=np.int32) * np.int32(rows * columns))[:, None]
        out = np.zeros(len(row) * rows * columns, bool)
        out[where.ravel()] = True
        out = _thinned(_widened(out.reshape(-1, rows, columns)))
        for step in range(level):
            out = out.repeat(2, axis=1).repeat(2, axis=2)
            if step == 0:  # a cell counts as soon as it is touched: half a cell too much on average, a pixel now
                out = _thinned(out)
        return out[self._crop]


def displaced(masks: Bool[np.ndarray, "T H W"], down: int, right: int) -> Bool[np.ndarray, "T H W"]:
    """Masks moved by whole pixels; nothing comes in at the border."""
    out = np.zeros_like(masks)
    target, source = zip(
        *(_overlap(n, step) for n, step in zip(masks.shape[1:], (down, right), strict=True)), strict=True
    )
    out[(slice(None), *target)] = masks[(slice(None), *source)]
    return out


def _overlap(size: int, step: int) -> tuple[slice, slice]:
    """Where something of `size` that moves by `step` arrives, and from where."""
    return slice(max(step, 0), size + min(step, 0)), slice(max(-step, 0), size + min(-step, 0))


def _widened(mask: Bool[np.ndarray, "T H W"]) -> Bool[np.ndarray, "T H W"]:
    """Dilated by a square of 3x3 pixels."""
    tall = mask.copy()
    tall[:, 1:] |= mask[:, :-1]
    tall[:, :-1] |= mask[:, 1:]
    out = tall.copy()
    out[:, :, 1:] |= tall[:, :, :-1]
    out[:, :, :-1] |= tall[:, :, 1:]
    return out


def _thinned(mask: Bool[np.ndarray, "T H W"]) -> Bool[np.ndarray, "T H W"]:
    """Eroded by a square of 3x3 pixels."""
    return ~_widened(~mask)


class ExactMasks:
    """Masks of moving links by MuJoCo's renderer, the camera free to move; a context manager like its renderer.

    Curved shapes are drawn with fewer facets than in pictures, which is several times faster and below a pixel
    here.
    """

    def __init__(self, robot: Robot, height: int, width: int) -> None:
        spec = robot.mjspec.copy()
        spec.visual.quality.numslices, spec.visual.quality.numstacks = 14, 8
        spec.visual.quality.offsamples = 0
        coarse = Robot(spec, name=robot.name, ee=robot.ee_name, source=robot.source)
        start = Camera.look_at((1.0, 0.0, 0.5), (0.0, 0.0, 0.0), fovy=50.0, height=height, width=width)
        self.renderer = ArmRenderer(coarse, start, height, width)

    def __enter__(self) -> "ExactMasks":
        return self

    def __exit__(self, *_: object) -> None:
        self.renderer.close()

    def show(self, geoms: Sequence[int]) -> None:
        """Draw these geoms alone from now on."""
        group = self.renderer.model.geom_group
        group[:] = _HIDDEN
        group[list(geoms)] = 0

    def draw(
        self, camera: Camera, q: Float64[np.ndarray, "T n"], opening: Float64[np.ndarray, " T"]
    ) -> Bool[np.ndarray, "T H W"]:
        """Masks at joints `q`, seen from `camera`, in the size given to the constructor."""
        self.renderer.look_from(camera)
        return np.stack([self.renderer.mask(row, float(part)) for row, part in zip(q, opening, strict=True)])


def _surface(model: mujoco.MjModel, geom: int, random: np.random.Generator) -> tuple[float, Draw]:
    """Area of a geom's surface (square metres), and what draws points on it in the geom's frame."""
    kind, size = int(model.geom_type[geom]), np.array(model.geom_size[geom], dtype=np.float64)
    kinds = mujoco.mjtGeom
    if kind == kinds.mjGEOM_MESH:
        return _mesh(model, int(model.geom_dataid[geom]), random)
    if kind == kinds.mjGEOM_BOX:
        return _box(size, random)
    if kind in (kinds.mjGEOM_CAPSULE, kinds.mjGEOM_CYLINDER):
        return _tube(size[0], size[1], kind == kinds.mjGEOM_CAPSULE, random)
    radii = size if kind == kinds.mjGEOM_ELLIPSOID else np.full(3, size[0])  # a sphere, or near enough to one
    area = 4 * np.pi * float(np.mean([radii[0] * radii[1], radii[1] * radii[2], radii[0] * radii[2]]))
    return area, lambda k: radii * _directions(k, random)


def _directions(count: int, random: np.random.Generator) -> Float64[np.ndarray, "k 3"]:
    out = random.normal(size=(count, 3))
    return np.asarray(out / np.linalg.norm(out, axis=1, keepdims=True))


def _mesh(model: mujoco.MjModel, mesh: int, random: np.random.Generator) -> tuple[float, Draw]:
    vertices = model.mesh_vert[model.mesh_vertadr[mesh] :][: model.mesh_vertnum[mesh]].astype(np.float64)
    corners = vertices[model.mesh_face[model.mesh_faceadr[mesh] :][: model.mesh_facenum[mesh]]]
    one, two = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    area = np.linalg.norm(np.cross(one, two), axis=1) / 2

    def draw(count: int) -> Float64[np.ndarray, "k 3"]:
        face = random.choice(len(area), count, p=area / area.sum())
        part = random.random((count, 2))
        part = np.where(part.sum(axis=1, keepdims=True) > 1, 1 - part, part)
        return np.asarray(corners[face, 0] + part[:, :1] * one[face] + part[:, 1:] * two[face])

    return float(area.sum()), draw


def _box(half: Float64[np.ndarray, " 3"], random: np.random.Generator) -> tuple[float, Draw]:
    side = np.array([half[1] * half[2], half[0] * half[2], half[0] * half[1]])

    def draw(count: int) -> Float64[np.ndarray, "k 3"]:
        out = random.uniform(-1, 1, (count, 3))
        out[np.arange(count), random.choice(3, count, p=side / side.sum())] = random.choice([-1, 1], count)
        return np.asarray(out * half)

    return 8 * float(side.sum()), draw


def _tube(radius: float, half: float, round_ends: bool, random: np.random.Generator) -> tuple[float, Draw]:
    """A cylinder along z, or a capsule."""
    side, ends = 4 * np.pi * radius * half, (4 if round_ends else 2) * np.pi * radius**2

    def draw(count: int) -> Float64[np.ndarray, "k 3"]:
        angle, way = random.uniform(0, 2 * np.pi, count), random.choice([-1.0, 1.0], count)
        ring = radius * np.column_stack([np.cos(angle), np.sin(angle)])
        wall = np.column_stack([ring, random.uniform(-half, half, count)])
        if round_ends:
            cap = radius * _directions(count, random)
            cap[:, 2] = way * (np.abs(cap[:, 2]) + half)
        else:
            cap = np.column_stack([ring * np.sqrt(random.random((count, 1))), way * half])
        return np.asarray(np.where(random.random((count, 1)) < side / (side + ends), wall, cap))

    return float(side + ends), draw
