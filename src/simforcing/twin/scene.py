"""The two views of the bundled world: the arm alone, and the arm at a table with things on it.

Both are compiled once per process and robot; an episode only writes colours, poses and the camera into them.
Legend: N frames, H W pixels, n arm joints. Metres, radians; poses are 4x4 matrices in the robot base frame.
"""

import atexit
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import mujoco
import numpy as np
from jaxtyping import Float64, UInt8

from simforcing.errors import SimForcingError
from simforcing.twin import arms
from simforcing.twin.augment import Workspace
from simforcing.twin.gl import no_renderer

TOOL_X = np.eye(3)  # the gripper points along x of site `ee` (WidowX)
TOOL_Z = np.array([[0.0, 0.0, 1.0], [0.0, -1.0, 0.0], [1.0, 0.0, 0.0]])  # the gripper points along z (Panda)
COLOURS: Mapping[str, tuple[float, float, float]] = {
    "red": (0.80, 0.12, 0.10),
    "green": (0.15, 0.62, 0.22),
    "blue": (0.12, 0.30, 0.78),
}
BLOCK, BALL, PLATE_RADIUS, PLATE_HEIGHT = 0.018, 0.020, 0.055, 0.006  # half edge, radius, radius, height
BLOCKS: tuple[str, ...] = ("block0", "block1")
MOVABLE: tuple[str, ...] = (*BLOCKS, "ball", "can", "bar")
TABLE_TEXTURES = 3


@dataclass(frozen=True)
class Setting:
    """What differs from robot to robot: where it works, how it stands, where the camera is."""

    build: Any
    home: tuple[float, ...]
    fingers: tuple[tuple[str, float, float], ...]  # joint, value when closed, value when open
    tool: Float64[np.ndarray, "3 3"]
    pitch: tuple[float, float]  # of the gripper in free motion; pi/2 is straight down
    workspace: Workspace
    camera: tuple[float, float, float]
    look_at: tuple[float, float, float]
    fovy: float
    table: tuple[float, float, float, float]  # x min, x max, y min, y max


SETTINGS: Mapping[str, Setting] = {
    "widowx250s": Setting(
        build=arms.widowx250s,
        home=(0.0, 0.0, 0.3, 0.0, 1.2, 0.0),
        fingers=(("left_finger", 0.015, 0.037), ("right_finger", 0.015, 0.037)),
        tool=TOOL_X,
        pitch=(0.75, 1.6),
        workspace=Workspace(
            lower=(0.17, -0.18, 0.025),
            upper=(0.38, 0.18, 0.27),
            centre=(0.0, 0.0, 0.11),
            tool=0.1586,
            reach=(0.14, 0.46),
        ),
        camera=(0.76, -0.46, 0.48),
        look_at=(0.165, 0.02, 0.158),
        fovy=43.0,
        table=(-0.25, 0.60, -0.55, 0.50),
    ),
    "panda": Setting(
        build=arms.panda,
        home=(0.0, -0.3, 0.0, -2.3, 0.0, 2.1, 0.785),
        fingers=(("panda_finger_joint1", 0.0, 0.04), ("panda_finger_joint2", 0.0, 0.04)),
        tool=TOOL_Z,
        pitch=(1.15, 1.7),
        workspace=Workspace(
            lower=(0.36, -0.22, 0.025),
            upper=(0.60, 0.22, 0.36),
            centre=(0.0, 0.0, 0.333),
            tool=0.21,
            reach=(0.28, 0.66),
            approach=(0.0, 0.0, 1.0),
        ),
        camera=(1.34, -0.80, 0.87),
        look_at=(0.30, 0.03, 0.30),
        fovy=38.0,
        table=(-0.30, 0.90, -0.70, 0.65),
    ),
}


def setting(robot: str) -> Setting:
    """The `Setting` of `robot`; raises `SimForcingError` for a robot that the bundled world does not have."""
    if robot not in SETTINGS:
        raise SimForcingError(f"world config robot {robot!r}: the bundled world has {', '.join(SETTINGS)}")
    return SETTINGS[robot]


class Canvas:
    """Off-screen drawing of one model from its camera `view`.

    It makes its own OpenGL context instead of `mujoco.Renderer`'s, which is settled when MuJoCo is first
    imported: a program that imports MuJoCo before this package would get one that needs a screen. Raises
    `SimForcingError`, naming the Debian packages, where there is no OpenGL.
    """

    def __init__(self, model: mujoco.MjModel, size: int, *, shadows: bool) -> None:
        name = os.environ.get("MUJOCO_GL", "").strip().lower()
        module = {"egl": "mujoco.egl", "osmesa": "mujoco.osmesa"}.get(name, "mujoco.gl_context")
        try:
            self._opengl = importlib.import_module(module).GLContext(size, size)
            self._opengl.make_current()
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        except Exception as error:  # whatever OpenGL's layers raise, the remedy is the same
            raise no_renderer(error) from error
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._model, self._size = model, size
        self._scene = mujoco.MjvScene(model, maxgeom=200)
        for flag in (
            mujoco.mjtRndFlag.mjRND_REFLECTION,
            mujoco.mjtRndFlag.mjRND_HAZE,
            mujoco.mjtRndFlag.mjRND_FOG,
        ):
            self._scene.flags[flag] = 0
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = int(shadows)
        self._option, self._camera = mujoco.MjvOption(), mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera.fixedcamid = model.camera("view").id
        self._rect = mujoco.MjrRect(0, 0, size, size)
        atexit.register(self.close)  # after OpenGL registered its own clean-up, hence before it runs

    def draw(self, data: mujoco.MjData) -> UInt8[np.ndarray, "H W 3"]:
        """RGB picture of `data`, whose kinematics must be up to date."""
        self._opengl.make_current()
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, data, self._option, None, self._camera, everything, self._scene)
        mujoco.mjr_render(self._rect, self._scene, self._context)
        pixels = np.empty((self._size, self._size, 3), np.uint8)
        mujoco.mjr_readPixels(pixels, None, self._rect, self._context)
        return pixels[::-1]  # OpenGL's rows go up

    def close(self) -> None:
        """Free the OpenGL context; drawing is over."""
        if self._opengl is not None:
            self._context.free()
            self._opengl.free()
            self._opengl = None


@dataclass
class View:
    """A compiled scene, its state, and its canvas, which is opened when the first picture is asked for."""

    model: mujoco.MjModel
    data: mujoco.MjData
    size: int
    shadows: bool
    _canvas: Canvas | None = field(default=None, repr=False)

    def draw(self) -> UInt8[np.ndarray, "H W 3"]:
        """RGB picture of the present state; kinematics must be up to date. Raises as `Canvas` does."""
        if self._canvas is None:
            self._canvas = Canvas(self.model, self.size, shadows=self.shadows)
        return self._canvas.draw(self.data)

    def pose(self) -> None:
        """Bring link, camera and light poses up to date with `data.qpos`, without dynamics."""
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_comPos(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)


@lru_cache(maxsize=4)
def simulation_view(robot: str, size: int) -> View:
    """The arm alone before a plain light background: no table, no shadow, no dynamics."""
    chosen = setting(robot)
    spec = _common(chosen, ambient=0.5)
    _background(spec, (0.88, 0.89, 0.91))
    spec.worldbody.add_light(
        pos=[0.3, -0.5, 1.6],
        dir=[-0.2, 0.35, -1.0],
        type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL,
        diffuse=[0.45] * 3,
        specular=[0.1] * 3,
        castshadow=False,
    )
    return _finish(spec, size, shadows=False)


@lru_cache(maxsize=4)
def real_view(robot: str, size: int, timestep: float) -> View:
    """The arm at a table: two blocks, a ball, a plate and two distractors, contact, a light with shadows."""
    chosen = setting(robot)
    spec = _common(chosen, ambient=0.42)
    spec.option.timestep = timestep
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    spec.option.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
    spec.option.impratio = 10.0
    spec.option.iterations = 20
    spec.worldbody.add_light(
        name="lamp",
        pos=[0.2, 0.0, 1.1],
        dir=[-0.15, 0.3, -1.0],
        type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL,
        diffuse=[0.55] * 3,
        specular=[0.3] * 3,
        castshadow=True,
    )
    _background(spec, (0.52, 0.56, 0.60))
    _furniture(spec, chosen)
    _things(spec)
    return _finish(spec, size, shadows=True)


def _common(chosen: Setting, ambient: float) -> mujoco.MjSpec:
    spec: mujoco.MjSpec = chosen.build()
    quality = spec.visual.quality
    quality.shadowsize, quality.offsamples = 512, 0
    quality.numslices, quality.numstacks, quality.numquads = 12, 7, 2
    head = spec.visual.headlight
    head.ambient, head.diffuse, head.specular = [ambient] * 3, [0.22] * 3, [0.05] * 3
    spec.visual.map.znear, spec.visual.map.shadowclip = 0.05, 1.0
    spec.stat.extent, spec.stat.center = 1.0, [0.2, 0.0, 0.15]
    spec.worldbody.add_camera(
        name="view", pos=chosen.camera, quat=look_at(chosen.camera, chosen.look_at), fovy=chosen.fovy
    )
    return spec


def _background(spec: mujoco.MjSpec, colour: tuple[float, float, float]) -> None:
    """One colour all around, which takes no light and no shadow."""
    spec.add_texture(
        name="sky",
        type=mujoco.mjtTexture.mjTEXTURE_SKYBOX,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_GRADIENT,
        rgb1=colour,
        rgb2=colour,
        width=16,
        height=16,
    )


def _finish(spec: mujoco.MjSpec, size: int, *, shadows: bool) -> View:
    spec.visual.global_.offwidth = spec.visual.global_.offheight = size
    model = spec.compile()
    return View(model, mujoco.MjData(model), size, shadows)


def _furniture(spec: mujoco.MjSpec, chosen: Setting) -> None:
    """Table top with plain low-frequency textures to choose from, and the ground that it stands for."""
    x0, x1, y0, y1 = chosen.table
    for i in range(TABLE_TEXTURES):
        spec.add_texture(
            name=f"table{i}",
            type=mujoco.mjtTexture.mjTEXTURE_2D,
            width=64,
            height=64,
            nchannel=3,
            data=table_texture(i).ravel().tolist(),
        )
        material = spec.add_material(name=f"table{i}", specular=0.05, shininess=0.1, texuniform=False)
        material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = f"table{i}"
    plane = mujoco.mjtGeom.mjGEOM_PLANE
    world = spec.worldbody
    centre = [(x0 + x1) / 2, (y0 + y1) / 2, -0.0005]
    half = [(x1 - x0) / 2, (y1 - y0) / 2, 1.0]
    world.add_geom(name="table", type=plane, pos=centre, size=half, material="table0", contype=0, conaffinity=0)
    # what things stand on: seen as the table, so it is in a group that is not drawn
    world.add_geom(
        name="ground",
        type=plane,
        size=[0, 0, 1],
        contype=1,
        conaffinity=3,
        friction=[0.7, 0.01, 0.001],
        group=4,
    )


def _things(spec: mujoco.MjSpec) -> None:
    """Movable things (free joints) and the plate (fixed; an episode moves its body)."""
    kinds = mujoco.mjtGeom
    touch: dict[str, Any] = {"contype": 1, "conaffinity": 3, "solref": [0.01, 1.0]}
    shapes: Mapping[str, tuple[Any, Sequence[float], float]] = {
        "block0": (kinds.mjGEOM_BOX, [BLOCK] * 3, 0.05),
        "block1": (kinds.mjGEOM_BOX, [BLOCK] * 3, 0.05),
        "ball": (kinds.mjGEOM_SPHERE, [BALL, 0, 0], 0.04),
        "can": (kinds.mjGEOM_CYLINDER, [0.022, 0.035, 0], 0.15),
        "bar": (kinds.mjGEOM_BOX, [0.045, 0.016, 0.012], 0.10),
    }
    for name, (kind, size, mass) in shapes.items():
        body = spec.worldbody.add_body(name=name)
        body.add_freejoint(name=name)
        rolls = kind == kinds.mjGEOM_SPHERE
        friction = [1.0, 0.02, 0.004] if rolls else [0.8, 0.01, 0.001]
        body.add_geom(name=name, type=kind, size=size, mass=mass, friction=friction, condim=6 if rolls else 4, **touch)
    plate = spec.worldbody.add_body(name="plate")
    plate.add_geom(
        name="plate",
        type=kinds.mjGEOM_CYLINDER,
        size=[PLATE_RADIUS, PLATE_HEIGHT / 2, 0],
        pos=[0, 0, PLATE_HEIGHT / 2],
        **touch,
    )


def table_texture(kind: int) -> UInt8[np.ndarray, "64 64 3"]:
    """Nearly white, low in contrast and frequency: 0 plain, 1 soft grain along one axis, 2 soft blotches."""
    rng = np.random.default_rng(kind)
    y, x = np.mgrid[0:64, 0:64] / 64.0
    shade = np.zeros((64, 64))
    if kind == 1:
        shade = (
            sum(
                rng.normal() * np.sin(2 * np.pi * (f * y + rng.random() + 0.05 * np.sin(2 * np.pi * x)))
                for f in (2, 3, 5)
            )
            / 3
            + 0 * x
        )
    elif kind == 2:
        for _ in range(6):
            fx, fy = rng.integers(-2, 3, size=2)
            shade = shade + rng.normal() * np.sin(2 * np.pi * (fx * x + fy * y + rng.random())) / 4
    level = np.clip(235 + 14 * shade, 190, 255)
    return np.repeat(level[..., None], 3, axis=2).astype(np.uint8)


def look_at(position: Sequence[float], target: Sequence[float]) -> Float64[np.ndarray, "4"]:
    """Quaternion (wxyz) of a camera at `position` that looks at `target`, with z up in the picture."""
    back = np.asarray(position, float) - np.asarray(target, float)
    back /= np.linalg.norm(back)
    right = np.cross([0.0, 0.0, 1.0], back)
    right /= np.linalg.norm(right)
    quat = np.empty(4)
    mujoco.mju_mat2Quat(quat, np.stack([right, np.cross(back, right), back], axis=1).ravel())
    return quat


@dataclass
class Follower:
    """Joint angles that put site `ee` at given poses: damped least squares, warm-started from frame to frame.

    A playground of its own beside `Robot.ik`: a few dozen microseconds an iteration, so that simulated
    episodes are bounded by drawing and not by inverse kinematics.
    """

    model: mujoco.MjModel
    home: Float64[np.ndarray, "n"]
    data: mujoco.MjData = field(init=False)

    def __post_init__(self) -> None:
        self.data = mujoco.MjData(self.model)
        self.count = len(self.home)
        self.site = self.model.site("ee").id
        self.low = self.model.jnt_range[: self.count, 0].copy()
        self.high = self.model.jnt_range[: self.count, 1].copy()
        self._jac = np.zeros((6, self.model.nv))

    def fk(self, q: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "4 4"]:
        """Pose of site `ee` at joint angles `q`."""
        self._place(q)
        pose = np.eye(4)
        pose[:3, 3] = self.data.site_xpos[self.site]
        pose[:3, :3] = self.data.site_xmat[self.site].reshape(3, 3)
        return pose

    def follow(
        self, poses: Float64[np.ndarray, "N 4 4"], iterations: int = 30
    ) -> tuple[Float64[np.ndarray, "N n"], Float64[np.ndarray, "N"]]:
        """Joint angles for each pose, and the position error that is left in metres."""
        q = self.home.copy()
        q[0] = np.clip(np.arctan2(poses[0, 1, 3], poses[0, 0, 3]), self.low[0], self.high[0])
        path, errors = np.empty((len(poses), self.count)), np.empty(len(poses))
        for i, pose in enumerate(poses):
            for _ in range(iterations + (60 if i == 0 else 0)):
                error = self._error(q, pose)
                if np.abs(error[:3]).max() < 1e-4 and np.abs(error[3:]).max() < 1e-3:
                    break
                q = np.clip(q + self._step(q, error), self.low, self.high)
            path[i], errors[i] = q, np.linalg.norm(self._error(q, pose)[:3])
        return path, errors

    def _place(self, q: Float64[np.ndarray, "n"]) -> None:
        self.data.qpos[: self.count] = q
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_comPos(self.model, self.data)

    def _error(self, q: Float64[np.ndarray, "n"], pose: Float64[np.ndarray, "4 4"]) -> Float64[np.ndarray, "6"]:
        """Translation (m) and rotation vector (rad) from the pose at `q` to `pose`, in the base frame."""
        self._place(q)
        error = np.empty(6)
        error[:3] = pose[:3, 3] - self.data.site_xpos[self.site]
        turn = pose[:3, :3] @ self.data.site_xmat[self.site].reshape(3, 3).T
        quat = np.empty(4)
        mujoco.mju_mat2Quat(quat, turn.ravel())
        mujoco.mju_quat2Vel(error[3:], quat, 1.0)
        return error

    def _step(self, q: Float64[np.ndarray, "n"], error: Float64[np.ndarray, "6"]) -> Float64[np.ndarray, "n"]:
        mujoco.mj_jacSite(self.model, self.data, self._jac[:3], self._jac[3:], self.site)
        jac = self._jac[:, : self.count]
        weight = np.array([1.0, 1.0, 1.0, 0.2, 0.2, 0.2])
        jac, error = jac * weight[:, None], error * weight
        grip = jac.T @ np.linalg.inv(jac @ jac.T + 1e-4 * np.eye(6))
        step = grip @ error
        if self.count > 6:  # a redundant arm leans to its home posture where that costs the pose nothing
            lean = self.home - q
            lean[0] += np.arctan2(self.data.site_xpos[self.site][1], self.data.site_xpos[self.site][0])
            step = step + 0.2 * (lean - grip @ (jac @ lean))
        out: Float64[np.ndarray, "n"] = np.clip(step, -0.35, 0.35)
        return out
