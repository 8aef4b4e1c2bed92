"""The arm-only view: a robot's links on a plain background, without shadow, as picture or mask.

Shapes: H W picture size, n arm joints. Pictures are RGB uint8; masks are true where the arm is.
"""

import atexit
from dataclasses import replace
from types import TracebackType
from typing import Any

import mujoco
import numpy as np
from jaxtyping import Bool, Float64, UInt8

from simforcing.errors import SimForcingError
from simforcing.twin.camera import Camera
from simforcing.twin.gl import no_renderer
from simforcing.twin.robot import Robot

BACKGROUND = (0.42, 0.48, 0.54)
_LINKS = ((0.93, 0.93, 0.91), (0.72, 0.74, 0.76))  # alternating from link to link
_GRIPPER = ((0.16, 0.17, 0.19), (0.32, 0.33, 0.36))  # hand, fingers
_PLAIN = (0.5, 0.5, 0.5, 1.0)  # MuJoCo's colour of a geom that has none
_HIDDEN = 5
_VISUAL_GROUPS = 3  # groups 0 to 2 are drawn by default; models keep their collision shapes in 3 and above


class ArmRenderer:
    """Draws one robot from one camera; a context manager that closes its OpenGL context.

    `height` and `width` (pixels) must have the camera's shape. Raises SimForcingError where the machine has
    no renderer, naming the Debian packages that bring one.
    """

    def __init__(self, robot: Robot, camera: Camera, height: int, width: int) -> None:
        self.robot = robot
        self.camera = camera.resized(height, width)
        self.model = _scene(robot, self.camera)
        self.data = mujoco.MjData(self.model)
        self._option = mujoco.MjvOption()
        self._option.geomgroup[:] = [1, 0, 0, 0, 0, 0]
        for groups in ("sitegroup", "jointgroup", "tendongroup", "actuatorgroup", "flexgroup", "skingroup"):
            getattr(self._option, groups)[:] = 0
        self._renderer = _open(self.model, height, width)

    def __enter__(self) -> "ArmRenderer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the OpenGL context; drawing is over."""
        self._renderer.close()

    def look_from(self, camera: Camera) -> None:
        """Draw from another camera from now on; the size of the pictures stays."""
        self.camera = replace(camera, height=self.camera.height, width=self.camera.width)
        number, quat = self.model.camera("simforcing").id, np.empty(4)
        mujoco.mju_mat2Quat(quat, self.camera.pose[:3, :3].flatten())
        self.model.cam_pos[number], self.model.cam_quat[number] = self.camera.pose[:3, 3], quat
        self.model.cam_fovy[number] = self.camera.fovy

    def _draw(self, q: Float64[np.ndarray, " n"], opening: float | None) -> Any:
        self.robot.set_joints(self.data, q, opening)
        mujoco.mj_camlight(self.model, self.data)
        self._renderer.update_scene(self.data, camera="simforcing", scene_option=self._option)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._renderer.scene.flags[flag] = 0
        drawn = self._renderer.render()
        return drawn[:, ::-1] if self.camera.mirrored else drawn

    def picture(self, q: Float64[np.ndarray, " n"], opening: float | None = None) -> UInt8[np.ndarray, "H W 3"]:
        """The arm at joints `q`, its gripper at `opening` (0 closed, 1 open, None as the model has it)."""
        return np.array(self._draw(q, opening), dtype=np.uint8)

    def mask(self, q: Float64[np.ndarray, " n"], opening: float | None = None) -> Bool[np.ndarray, "H W"]:
        """True where `picture` shows the arm."""
        self._renderer.enable_segmentation_rendering()
        try:
            return np.asarray(self._draw(q, opening)[..., 0] >= 0)
        finally:
            self._renderer.disable_segmentation_rendering()


class KeptRenderer:
    """An `ArmRenderer` that opens when it is first needed, and closes at the latest when the process ends."""

    def __init__(self, robot: Robot, camera: Camera) -> None:
        self.robot, self.camera = robot, camera
        self._renderer: ArmRenderer | None = None

    def __call__(self, camera: Camera | None = None) -> ArmRenderer:
        """The open renderer, for pictures of the camera's size; from another camera of that size where one is given.

        Raises as `ArmRenderer` does.
        """
        if self._renderer is None:
            self._renderer = ArmRenderer(self.robot, self.camera, self.camera.height, self.camera.width)
            atexit.register(self.close)  # after OpenGL registered its own clean-up, hence before it runs
        self._renderer.look_from(camera or self.camera)
        return self._renderer

    def close(self) -> None:
        """Free the OpenGL context, if there is one."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
            atexit.unregister(self.close)


def masked_first_frame(real: UInt8[np.ndarray, "H W 3"], arm: Bool[np.ndarray, "H W"]) -> UInt8[np.ndarray, "H W 3"]:
    """A first simulated frame from a real one: the pixels of the arm, on the background of the simulated views.

    arm: true where the robot is, by a segmentation model or by `ArmRenderer.mask` under a calibrated camera. Raises
    SimForcingError where the sizes differ.
    """
    if real.shape[:2] != arm.shape:
        raise SimForcingError(f"arm mask is {arm.shape[0]}x{arm.shape[1]}, the picture {real.shape[0]}x{real.shape[1]}")
    plain = np.round(255 * np.array(BACKGROUND)).astype(np.uint8)
    return np.asarray(np.where(arm[..., None], real, plain))


def _open(model: mujoco.MjModel, height: int, width: int) -> Any:
    """MuJoCo's renderer, or an error that says what to install."""
    try:
        return mujoco.Renderer(model, height, width)
    except (ImportError, AttributeError, RuntimeError, mujoco.FatalError) as error:
        raise no_renderer(error) from error


def _scene(robot: Robot, camera: Camera) -> mujoco.MjModel:
    """The robot's model with the camera, even light and a plain background, and nothing else to see."""
    spec = robot.mjspec.copy()
    base = spec.worldbody if robot.base_name == "world" else spec.body(robot.base_name)
    quat = np.empty(4)
    mujoco.mju_mat2Quat(quat, camera.pose[:3, :3].flatten())
    base.add_camera(name="simforcing", pos=camera.pose[:3, 3], quat=quat, fovy=camera.fovy)
    for old in list(spec.lights):
        spec.delete(old)
    for old in [t for t in spec.textures if t.type == mujoco.mjtTexture.mjTEXTURE_SKYBOX]:
        spec.delete(old)
    spec.add_texture(
        name="simforcing_background",
        type=mujoco.mjtTexture.mjTEXTURE_SKYBOX,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_FLAT,
        rgb1=BACKGROUND,
        rgb2=BACKGROUND,
        width=16,
        height=16,
    )
    for direction in ((-0.4, 0.5, -0.8), (0.6, -0.3, -0.7)):
        spec.worldbody.add_light(
            pos=(0, 0, 3),
            dir=direction,
            type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL,
            diffuse=(0.35, 0.35, 0.35),
            specular=(0.1, 0.1, 0.1),
            castshadow=False,
        )
    spec.visual.headlight.ambient = (0.35, 0.35, 0.35)
    spec.visual.headlight.diffuse = (0.35, 0.35, 0.35)
    spec.visual.headlight.specular = (0.0, 0.0, 0.0)
    spec.visual.global_.offwidth, spec.visual.global_.offheight = camera.width, camera.height
    model = spec.compile()
    _dress(robot, model)
    return model


def _dress(robot: Robot, model: mujoco.MjModel) -> None:
    """Hide what is not the arm, and paint links and gripper where the model leaves them grey."""
    base = model.body(robot.base_name).id
    fingers = {int(model.jnt_bodyid[model.joint(f.joint).id]) for f in robot.fingers}
    last = int(model.jnt_bodyid[model.joint(robot.joint_names[-1]).id])
    lines = [_line(model, int(body)) for body in model.geom_bodyid]
    arm = [base in line and int(model.geom_type[g]) != mujoco.mjtGeom.mjGEOM_PLANE for g, line in enumerate(lines)]
    visual = [ok and model.geom_group[g] < _VISUAL_GROUPS for g, ok in enumerate(arm)]
    shown = visual if any(visual) else arm
    for geom, line in enumerate(lines):
        model.geom_group[geom] = 0 if shown[geom] else _HIDDEN
        if model.geom_matid[geom] >= 0 or not np.allclose(model.geom_rgba[geom], _PLAIN):
            continue
        if fingers & set(line):
            colour = _GRIPPER[1]
        elif last in line and line[-1] != last:
            colour = _GRIPPER[0]
        else:
            colour = _LINKS[sum(int(model.body_jntnum[body]) for body in line) % 2]
        model.geom_rgba[geom] = (*colour, 1.0)


def _line(model: mujoco.MjModel, body: int) -> list[int]:
    """Bodies from the world down to `body`."""
    line = [body]
    while body:
        body = int(model.body_parentid[body])
        line.append(body)
    return line[::-1]
