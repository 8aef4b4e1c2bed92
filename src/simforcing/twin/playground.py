"""The bundled world: one action sequence seen by an idealised simulation and by a camera in a 'real' room.

*Simulation*: the arm alone follows the commanded poses exactly. *Real*: an arm of other materials at a
table follows them with lag and gain error, under physics, among things that it pushes and grasps, seen by a
camera that stands a little differently in every episode.

Legend: N frames, H W pixels. Metres, radians, Hz; poses in the robot base frame. `targets[i]` is the
commanded pose at frame i + 1 (an `absolute` action), `state[i]` the measured pose at frame i. Everything
follows from the seed.
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from jaxtyping import Float32, Float64, UInt8
from scipy.spatial.transform import Rotation

from simforcing.data import REAL, SIM, ActionConvention, LeRobotWriter
from simforcing.errors import SimForcingError
from simforcing.twin.augment import AugmentConfig, about, augment_trajectory
from simforcing.twin.parallel import process_pool
from simforcing.twin.scene import (
    COLOURS,
    MOVABLE,
    TABLE_TEXTURES,
    Follower,
    Setting,
    look_at,
    real_view,
    setting,
    simulation_view,
)
from simforcing.twin.script import Layout, Plan, draw_plan, path

ROW_NAMES = ("x", "y", "z", "rx", "ry", "rz", "gripper")
"""Names of the numbers of a state or action row: metres, rotation vector in radians, opening (1 is open)."""

Progress = Callable[[int, int], None]
"""Called with the number of episodes done and of all."""


@dataclass(frozen=True)
class WorldConfig:
    """The bundled world. Sizes in pixels, fps in Hz, lengths in metres, angles in radians, times in seconds.

    How well simulation and 'real' agree: `lag` (time constant of the arm), `gain_error` (relative, one draw
    an axis), `bias` (constant offset of each axis), `camera_shift`, `camera_turn`, `sensor_noise` (grey
    levels of 255); the spreads are standard deviations, drawn once an episode. `appearance` in [0, 1]
    scales the variety of colours and light in the 'real' view. `speed` is the range of metres a frame.
    Raises `SimForcingError` for values out of range.
    """

    size: int = 128
    fps: int = 5
    length: int = 33
    robot: str = "widowx250s"
    lag: float = 0.045
    gain_error: float = 0.03
    bias: float = 0.004
    camera_shift: float = 0.005
    camera_turn: float = 0.006
    sensor_noise: float = 1.5
    appearance: float = 1.0
    speed: tuple[float, float] = (0.037, 0.058)
    timestep: float = 0.005
    augmentation: AugmentConfig = field(default_factory=AugmentConfig)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "WorldConfig":
        """The configuration that a dataset of this world was made with, from its `meta/simforcing.json`.

        Raises SimForcingError for keys that this version does not know.
        """

        def plain(values: Mapping[str, Any]) -> dict[str, Any]:
            return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}

        try:
            return cls(**{**plain(stored), "augmentation": AugmentConfig(**plain(stored["augmentation"]))})
        except (TypeError, KeyError) as error:
            raise SimForcingError(f"world config: made by another version ({error}); make the pairs anew") from error

    def __post_init__(self) -> None:
        setting(self.robot)
        _within("size", self.size, 16, 1024)
        if self.size % 2:
            raise SimForcingError(f"world config size={self.size}: must be even (video files need it)")
        _within("fps", self.fps, 1, 50)
        _within("length", self.length, 2, 2000)
        for name, high in (("lag", 1.0), ("gain_error", 0.5), ("bias", 0.2), ("camera_shift", 0.2)):
            _within(name, getattr(self, name), 0.0, high)
        _within("camera_turn", self.camera_turn, 0.0, 0.5)
        _within("sensor_noise", self.sensor_noise, 0.0, 64.0)
        _within("appearance", self.appearance, 0.0, 1.0)
        _within("timestep", self.timestep, 0.0005, 0.01)
        _within("speed", self.speed[0], 0.001, 0.2)
        _within("speed", self.speed[1], self.speed[0], 0.2)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise SimForcingError(f"world config {name}={value}: must lie in [{low}, {high}]")


@dataclass(frozen=True)
class Rollout:
    """One episode: task in words, commanded and measured poses, what either view saw (None: not drawn)."""

    task: str
    targets: Float32[np.ndarray, "N 7"]
    state: Float32[np.ndarray, "N 7"]
    sim: UInt8[np.ndarray, "N H W 3"]
    real: UInt8[np.ndarray, "N H W 3"] | None


def episode(seed: int, config: WorldConfig = WorldConfig(), *, real: bool = True, augment: bool = False) -> Rollout:
    """The episode of `seed`, byte for byte the same on every call.

    `real=False` draws the simulation only (`state` is then the commanded pose, `real` None); its picture is
    the same as with `real=True`. `augment=True` changes the scripted motion by `augment_trajectory`. Raises
    `SimForcingError` for a negative seed or without an OpenGL renderer.
    """
    if seed < 0:
        raise SimForcingError(f"episode seed {seed}: must not be negative")
    for_script, for_change, for_real = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3))
    chosen = setting(config.robot)
    plan = draw_plan(for_script, chosen, config.length)
    poses = path(plan.waypoints, config.length, float(for_script.uniform(*config.speed)), chosen.tool)
    poses = chosen.workspace.clamp(poses)
    if augment:
        poses = augment_trajectory(poses, for_change, chosen.workspace, config.augmentation)
    poses = about(poses, _down(chosen))
    sim = simulate(poses, config)
    targets = np.concatenate([poses[1:], poses[-1:]]).astype(np.float32)
    if not real:
        return Rollout(plan.task, targets, poses.astype(np.float32), sim, None)
    state, frames = _RealRun(config, plan, poses, for_real).run()
    return Rollout(plan.task, targets, state.astype(np.float32), sim, frames)


def matrices(poses: Float64[np.ndarray, "N 7"]) -> Float64[np.ndarray, "N 4 4"]:
    """Homogeneous matrices of rows xyz, rotation vector, opening."""
    out = np.tile(np.eye(4), (len(poses), 1, 1))
    out[:, :3, 3] = poses[:, :3]
    out[:, :3, :3] = Rotation.from_rotvec(poses[:, 3:6]).as_matrix()
    return out


def _down(chosen: Setting) -> Float64[np.ndarray, "3"]:
    """Rotation vector of site `ee` when the gripper points straight down and ahead."""
    down: Float64[np.ndarray, "3"] = (
        Rotation.from_euler("Y", np.pi / 2) * Rotation.from_matrix(chosen.tool)
    ).as_rotvec()
    return down


@lru_cache(maxsize=4)
def _follower(robot: str, size: int) -> Follower:
    return Follower(simulation_view(robot, size).model, np.array(setting(robot).home))


def _finger_values(chosen: Setting, opening: Float64[np.ndarray, "N"]) -> Float64[np.ndarray, "N f"]:
    columns = [closed + (opened - closed) * opening for _, closed, opened in chosen.fingers]
    return np.stack(columns, axis=-1)


def simulate(poses: Float64[np.ndarray, "N 7"], config: WorldConfig = WorldConfig()) -> UInt8[np.ndarray, "N H W 3"]:
    """The simulation view of commanded poses (first frame first): inverse kinematics, no dynamics, no lag."""
    view, chosen = simulation_view(config.robot, config.size), setting(config.robot)
    joints, _ = _follower(config.robot, config.size).follow(matrices(poses))
    joints = np.concatenate([joints, _finger_values(chosen, poses[:, 6])], axis=1)
    frames = np.empty((len(joints), config.size, config.size, 3), np.uint8)
    for i, q in enumerate(joints):
        view.data.qpos[:] = q
        view.pose()
        frames[i] = view.draw()
    return frames


class _RealRun:
    """One 'real' episode: dresses the scene, runs the physics, draws the frames."""

    def __init__(
        self, config: WorldConfig, plan: Plan, poses: Float64[np.ndarray, "N 7"], rng: np.random.Generator
    ) -> None:
        self.config, self.poses, self.rng = config, poses, rng
        self.chosen = setting(config.robot)
        self.view = real_view(config.robot, config.size, config.timestep)
        self.follower = _follower(config.robot, config.size)
        self._dress(plan.layout)
        self._place(plan.layout)

    def run(self) -> tuple[Float64[np.ndarray, "N 7"], UInt8[np.ndarray, "N H W 3"]]:
        """Measured poses and pictures at every frame."""
        config, model, data = self.config, self.view.model, self.view.data
        wanted, _ = self.follower.follow(matrices(self._misread(self.poses)))
        wanted = np.concatenate([wanted, _finger_values(self.chosen, self.poses[:, 6])], axis=1)
        n, width = wanted.shape
        data.qpos[:width] = data.ctrl[:width] = wanted[0]
        mujoco.mj_forward(model, data)
        steps = max(1, round(1.0 / config.fps / config.timestep))
        chunk = 5
        keep = float(np.exp(-chunk * config.timestep / config.lag)) if config.lag > 0 else 0.0
        state, frames = np.empty((n, 7)), np.empty((n, config.size, config.size, 3), np.uint8)
        command = wanted[0].copy()
        for i in range(n):
            if i > 0:
                for k in range(0, steps, chunk):
                    part = min(1.0, (k + chunk) / steps)
                    goal = wanted[i - 1] + part * (wanted[i] - wanted[i - 1])
                    command = goal + keep * (command - goal)
                    data.ctrl[:width] = command
                    mujoco.mj_step(model, data, min(chunk, steps - k))
                self.view.pose()
            state[i] = self._measure()
            frames[i] = self._sense(self.view.draw())
        return about(state, _down(self.chosen)), frames

    def _misread(self, poses: Float64[np.ndarray, "N 7"]) -> Float64[np.ndarray, "N 7"]:
        """What the 'real' arm takes the commands for: gain error about the workspace's middle, and a bias."""
        space, rng, config = self.chosen.workspace, self.rng, self.config
        middle = (np.array(space.lower) + np.array(space.upper)) / 2
        out = poses.copy()
        gain = 1.0 + config.gain_error * np.clip(rng.normal(size=3), -2, 2)
        out[:, :3] = middle + (out[:, :3] - middle) * gain
        out[:, :3] += config.bias * np.clip(rng.normal(size=3), -2, 2)
        floor = np.minimum(poses[:, 2], 0.024)
        out[:, 2] = np.maximum(out[:, 2], floor)
        return out

    def _measure(self) -> Float64[np.ndarray, "7"]:
        data, site = self.view.data, self.view.model.site("ee").id
        name, closed, opened = self.chosen.fingers[0]
        out, quat = np.empty(7), np.empty(4)
        out[:3] = data.site_xpos[site]
        mujoco.mju_mat2Quat(quat, data.site_xmat[site])
        mujoco.mju_quat2Vel(out[3:6], quat, 1.0)
        out[6] = np.clip((data.joint(name).qpos[0] - closed) / (opened - closed), 0.0, 1.0)
        return out

    def _sense(self, picture: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "H W 3"]:
        shift = self.rng.integers(0, 1 << 16, size=2)
        grain = np.roll(self.grain, (int(shift[0]) % len(self.grain), int(shift[1]) % len(self.grain)), axis=(0, 1))
        noisy = picture * self.exposure + grain
        out: UInt8[np.ndarray, "H W 3"] = np.clip(noisy + 0.5, 0.0, 255.0).astype(np.uint8)
        return out

    def _dress(self, layout: Layout) -> None:
        """Colours, table, light, camera and sensor of this episode."""
        model, rng, config = self.view.model, self.rng, self.config
        spread = config.appearance
        dark = rng.uniform(0.10, 0.17) if spread > 0 else 0.13
        silver = 0.45 + spread * rng.uniform(-0.08, 0.08)
        for name, colour in (
            ("shell", (dark, dark, dark * 1.08)),
            ("joint", (silver, silver, silver * 1.03)),
            ("gripper", (0.58, 0.59, 0.62)),
            ("finger", (0.07, 0.07, 0.08)),
        ):
            model.mat(name).rgba[:3] = colour
        model.geom("table").matid = model.mat(f"table{int(rng.integers(TABLE_TEXTURES))}").id
        warm = np.array([(0.80, 0.70, 0.58), (0.74, 0.74, 0.72), (0.66, 0.72, 0.74), (0.82, 0.80, 0.74)])
        table = warm[int(rng.integers(len(warm)))] + spread * rng.uniform(-0.05, 0.05)
        for i in range(TABLE_TEXTURES):
            model.mat(f"table{i}").rgba[:3] = table
        for name, word in layout.colours.items():
            model.geom(name).rgba[:3] = COLOURS[word]
        model.geom("plate").rgba[:3] = (0.95, 0.94, 0.90)
        model.geom("can").rgba[:3] = np.array([0.85, 0.70, 0.20]) + spread * rng.uniform(-0.1, 0.1, size=3)
        model.geom("bar").rgba[:3] = np.array([0.45, 0.30, 0.50]) + spread * rng.uniform(-0.1, 0.1, size=3)
        shine = np.array([-0.15, 0.3, -1.0]) + spread * rng.uniform(-0.2, 0.2, size=3)
        shine /= np.linalg.norm(shine)
        model.light("lamp").dir[:] = shine
        model.light("lamp").pos[:] = np.array(self.chosen.look_at) - 1.0 * shine  # shadows reach from here to 2 m on
        model.light("lamp").diffuse[:] = 0.55 + spread * rng.uniform(-0.07, 0.07)
        eye = np.array(self.chosen.camera) + config.camera_shift * np.clip(rng.normal(size=3), -2, 2)
        turn = config.camera_turn * np.clip(rng.normal(size=3), -2, 2)
        nominal = look_at(self.chosen.camera, self.chosen.look_at)
        tilt = Rotation.from_rotvec(turn) * Rotation.from_quat(nominal, scalar_first=True)
        model.cam("view").pos[:] = eye
        model.cam("view").quat[:] = tilt.as_quat(scalar_first=True)
        self.exposure = np.float32(1.0 + 0.04 * spread * rng.uniform(-1, 1))
        grain = rng.standard_normal((config.size, config.size, 3), dtype=np.float32)
        self.grain = np.float32(config.sensor_noise) * grain

    def _place(self, layout: Layout) -> None:
        """Things of this episode onto the table, the others far away, out of sight."""
        model, data = self.view.model, self.view.data
        mujoco.mj_resetData(model, data)
        for i, name in enumerate(MOVABLE):
            present = name in layout.places
            x, y, z, turn = layout.places.get(name, (-4.0, 0.3 * i, 1.0, 0.0))
            model.geom(name).contype, model.geom(name).conaffinity = (1, 3) if present else (0, 0)
            model.body_gravcomp[model.body(name).id] = (
                0.0 if present else 1.0
            )  # absent things float far away and touch nothing
            data.joint(name).qpos[:] = (x, y, z, np.cos(turn / 2), 0.0, 0.0, np.sin(turn / 2))
        x, y, z, _ = layout.places.get("plate", (-4.0, -1.0, 1.0, 0.0))
        model.body("plate").pos[:] = (x, y, z)


def rollouts(
    seeds: Sequence[int],
    config: WorldConfig = WorldConfig(),
    *,
    real: bool = True,
    augment: bool = False,
    workers: int = 2,
) -> Generator[Rollout, None, None]:
    """`episode` of each seed, in their order, made by `workers` processes (0 or 1: in this one)."""
    if workers <= 1:
        yield from (episode(seed, config, real=real, augment=augment) for seed in seeds)
        return
    waiting: deque[Future[Rollout]] = deque()
    with process_pool(min(workers, max(1, len(seeds)))) as pool:
        try:
            for seed in seeds:
                waiting.append(pool.submit(episode, seed, config, real=real, augment=augment))
                if len(waiting) > 4 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def write_pairs(
    out: Path,
    seeds: Sequence[int],
    config: WorldConfig = WorldConfig(),
    *,
    workers: int = 2,
    progress: Progress | None = None,
) -> Path:
    """Write the paired LeRobot v3.0 dataset `out` (cameras REAL and SIM), one episode a seed.

    Raises `SimForcingError` if `out` exists or there are no seeds; a failure leaves nothing behind.
    """
    made = rollouts(seeds, config, workers=workers)
    return _write(out, seeds, config, made, (REAL, SIM), augment=False, progress=progress)


def write_simulation(
    out: Path,
    seeds: Sequence[int],
    config: WorldConfig = WorldConfig(),
    *,
    augment: bool = True,
    workers: int = 2,
    progress: Progress | None = None,
) -> Path:
    """Write a LeRobot v3.0 dataset of the simulation alone (camera SIM), one episode a seed, for the teacher.

    States are the commanded poses. Raises `SimForcingError` if `out` exists or there are no seeds.
    """
    made = rollouts(seeds, config, real=False, augment=augment, workers=workers)
    return _write(out, seeds, config, made, (SIM,), augment=augment, progress=progress)


def _write(
    out: Path,
    seeds: Sequence[int],
    config: WorldConfig,
    made: Generator[Rollout, None, None],
    cameras: tuple[str, ...],
    *,
    augment: bool,
    progress: Progress | None,
) -> Path:
    if not len(seeds):
        raise SimForcingError(f"{out}: no seeds, so no episodes; give at least one")
    size = (config.size, config.size)
    writer = LeRobotWriter(
        Path(out),
        fps=config.fps,
        robot=config.robot,
        cameras=dict.fromkeys(cameras, size),
        state_names=ROW_NAMES,
        action_names=ROW_NAMES,
        meta=_meta(seeds, config, augment),
    )
    with writer, closing(made):
        for done, rollout in enumerate(made, start=1):
            frames = {SIM: rollout.sim}
            if REAL in cameras and rollout.real is not None:
                frames[REAL] = rollout.real
            writer.add_episode(frames, rollout.state, rollout.targets, rollout.task)
            if progress is not None:
                progress(done, len(seeds))
    return Path(out)


def _meta(seeds: Sequence[int], config: WorldConfig, augment: bool) -> dict[str, Any]:
    """Content of `meta/simforcing.json`: everything that is needed to make the dataset again."""
    from simforcing.twin.camera import (
        Camera,
    )  # not above: the worker processes do without it and start faster

    chosen = setting(config.robot)
    camera = Camera.look_at(chosen.camera, chosen.look_at, fovy=chosen.fovy, height=config.size, width=config.size)
    return {
        "action": ActionConvention(hz=float(config.fps)).to_dict(),
        "robot": {"name": config.robot, "end_effector": "ee"},
        "camera": {"key": REAL, "source": "bundled world, nominal", **camera.to_dict()},
        "world": {"config": asdict(config), "augmented": augment, "seeds": [int(seed) for seed in seeds]},
    }
