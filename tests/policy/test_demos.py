"""Demonstrations: grasps from boxes, parts that are kept, the dataset, and the expert in simulation (slow)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simforcing.cli.main import main
from simforcing.data import StateConvention, open_dataset
from simforcing.errors import SimForcingError
from simforcing.policy import demos
from simforcing.policy.demos_expert import Expert, Goal, Manner
from simforcing.policy.demos_grasp import WIDEST, clear_height, find_grasp, reaches, turned
from simforcing.policy.libero_env import AGENT, CAMERAS, WRIST, Libero, Stand, Task, suite_tasks
from simforcing.policy.libero_numbers import STAY_OPEN, from_recording, to_recording


def box(middle: tuple[float, float, float], size: tuple[float, float, float], yaw: float = 0.0) -> np.ndarray:
    """Corners of an upright box, turned about its middle."""
    signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
    turn = np.array([[np.cos(yaw), -np.sin(yaw), 0], [np.sin(yaw), np.cos(yaw), 0], [0, 0, 1]])
    return signs * np.array(size) / 2 @ turn.T + middle


class Things:
    """What `find_grasp` looks at."""

    def __init__(self, **boxes: np.ndarray) -> None:
        self.shapes = boxes

    def boxes(self, name: str) -> np.ndarray:
        return self.shapes[name]

    def others(self, *names: str) -> np.ndarray:
        return np.concatenate([np.zeros((0, 8, 3)), *(b for name, b in self.shapes.items() if name not in names)])


def bowl(radius: float = 0.047, count: int = 16) -> np.ndarray:
    angles = np.arange(count) * 2 * np.pi / count
    walls = [box((radius * np.cos(a), radius * np.sin(a), 0.032), (0.004, 0.019, 0.036), a) for a in angles]
    return np.stack([box((0, 0, 0.003), (0.06, 0.06, 0.005)), *walls])


@settings(max_examples=25, deadline=None)
@given(st.floats(-3.1, 3.1), st.integers(0, 100))
def test_a_slab_is_taken_across_its_narrow_side(yaw: float, seed: int) -> None:
    things: Any = Things(butter=box((0.1, -0.2, 0.01), (0.12, 0.04, 0.02), yaw)[None])
    found = find_grasp(things, "butter", 0.0, np.random.default_rng(seed))
    assert abs(turned(found.yaw, yaw + np.pi / 2)) < 0.2
    np.testing.assert_allclose(found.place, [0.1, -0.2, 0.014], atol=0.004)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 100))
def test_a_tall_thing_is_taken_below_its_top(seed: int) -> None:
    things: Any = Things(carton=box((0, 0, 0.065), (0.05, 0.05, 0.13))[None])
    found = find_grasp(things, "carton", np.pi / 2, np.random.default_rng(seed))
    assert found.place[2] == pytest.approx(0.13 - 0.034)
    assert abs(turned(found.yaw, np.pi / 2)) < 0.3


@pytest.mark.parametrize("tilt", [0.0, 0.15])
def test_a_bowl_is_taken_by_its_rim_where_nothing_is_in_the_way(tilt: float) -> None:
    lean = np.array([[1, 0, 0], [0, np.cos(tilt), -np.sin(tilt)], [0, np.sin(tilt), np.cos(tilt)]])
    shape = bowl() @ lean.T
    free: Any = Things(bowl=shape)
    first = find_grasp(free, "bowl", np.pi / 2, np.random.default_rng(0))
    assert np.linalg.norm(first.place[:2]) == pytest.approx(0.047, abs=0.006)
    assert abs(np.sin(first.yaw)) > 0.9  # the gripper need not turn
    assert abs(turned(first.yaw, float(np.arctan2(first.place[1], first.place[0])))) < 0.15  # radial
    walls = [box((0, y, 0.05), (0.3, 0.05, 0.1)) for y in (-0.12, 0.12)]
    beside: Any = Things(bowl=shape, walls=np.stack(walls))
    second = find_grasp(beside, "bowl", np.pi / 2, np.random.default_rng(0))
    assert abs(np.cos(second.yaw)) > 0.9


def test_what_cannot_be_held() -> None:
    things: Any = Things(crate=box((0, 0, 0.1), (0.2, 0.2, 0.2))[None])
    with pytest.raises(SimForcingError, match=f"crate: is nowhere narrower than {100 * WIDEST:.0f} cm"):
        find_grasp(things, "crate", 0.0, np.random.default_rng(0))


@given(st.floats(-10, 10), st.floats(-10, 10))
def test_the_shortest_turn(yaw: float, current: float) -> None:
    found = turned(yaw, current)
    assert -np.pi / 2 <= found <= np.pi / 2
    assert np.sin(current + found - yaw) == pytest.approx(0, abs=1e-6)  # the same, or fingers exchanged


def test_what_is_passed_over() -> None:
    around = np.stack([box((0.1, 0, 0.05), (0.02, 0.02, 0.1)), box((0.1, 0.3, 0.2), (0.02, 0.02, 0.4))])
    start, end = np.array([0, 0, 0.2]), np.array([0.2, 0, 0.0])
    assert clear_height(around, start, end) == pytest.approx(0.1)
    assert clear_height(around[1:], start, end) == -np.inf
    assert clear_height(around, start, start) == -np.inf
    flags = reaches(around, np.array([0.1, 0.0]), np.array([0.0, 1.0]), (0.05, 0.05), 0.15)
    assert not flags.any()  # too low, too far


def test_manners() -> None:
    still = Manner.draw(np.random.default_rng(3), noise=0.0)
    assert still.noise == 0 and not still.aim.any() and not still.release.any() and still.yaw == 0
    first, second = (Manner.draw(np.random.default_rng(i)) for i in (1, 2))
    assert first.speed != second.speed and first.noise > 0


# -- parts and the dataset ---------------------------------------------------------------------------------------------


TASKS = [
    Task("libero_object", i, f"pick up the {w} and place it in the basket", Path("a"), Path("b"))
    for i, w in enumerate(("milk", "butter"))
]


def made(seed: int, length: int = 6) -> demos.Demonstration:
    rng = np.random.default_rng(seed)
    images = {key: rng.integers(0, 256, (length, 16, 16, 3), np.uint8) for key in CAMERAS}
    action = np.float32(rng.uniform(-1, 1, (length, 7)))
    return demos.Demonstration(images, np.float32(rng.normal(size=(length, 8))), action)


class World:
    """Stands for a simulation; what comes of an attempt is taken from a list."""

    def __init__(self, task: Task, size: int) -> None:
        self.task, self.size = task, size

    def close(self) -> None:
        pass


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every second attempt fails; notes task and seed of each."""
    noted: list[tuple[str, int]] = []

    def perform(world: World, seed: int, noise: float) -> demos.Demonstration | str:
        noted.append((world.task.name, seed))
        return made(seed) if len(noted) % 2 == 0 else "not solved at the end"

    monkeypatch.setattr(demos, "Libero", World)
    monkeypatch.setattr(demos, "perform", perform)
    monkeypatch.setattr(demos, "_worlds", {})
    return noted


def test_making_goes_on_where_it_stopped(tmp_path: Path, attempts: list[tuple[str, int]]) -> None:
    making = demos.Making(tmp_path / "parts", size=16)
    told: list[tuple[int, int, str]] = []
    found = demos.make_demos(making, TASKS, 2, report=lambda *what: told.append(what))
    assert found == {task.name: {"episodes": 2, "attempts": 4} for task in TASKS}
    assert len(attempts) == 8 and len({seed for _, seed in attempts}) == 8
    assert told[-1][:2] == (4, 4) and "attempt 2" in told[-1][2]
    file = demos.part_file(making.parts, TASKS[1], 1)
    kept = file.read_bytes()
    demos.part_file(making.parts, TASKS[0], 1).with_suffix(".json").unlink()
    demos.make_demos(making, TASKS, 2)
    assert attempts[8:] == attempts[2:4] and file.read_bytes() == kept  # the same again, and nothing else
    demos.make_demos(making, TASKS, 3)
    assert len(attempts) == 14
    with pytest.raises(SimForcingError, match="another configuration"):
        demos.make_demos(replace(making, noise=0.5), TASKS, 2)
    with pytest.raises(SimForcingError, match="give at least 1, an even size"):
        demos.make_demos(replace(making, size=15), TASKS, 2)


def test_an_expert_that_always_fails(tmp_path: Path, attempts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demos, "perform", lambda world, seed, noise: "not solved at the end")
    with pytest.raises(SimForcingError, match=r"the expert failed 5 times \(not solved at the end\)"):
        demos.make_demos(demos.Making(tmp_path / "parts", size=16), TASKS, 1)


def test_the_dataset(tmp_path: Path, attempts: list[Any]) -> None:
    making = demos.Making(tmp_path / "parts", size=16)
    summary = demos.make_demos(making, TASKS, 2)
    out = demos.assemble_demos(making, TASKS, 2, tmp_path / "demos", summary)
    dataset = open_dataset(out)
    assert dataset.cameras == (AGENT, WRIST) and dataset.fps == 20 and len(dataset) == 4
    assert dataset.tasks == tuple(task.instruction for _ in range(2) for task in TASKS)
    convention = dataset.action_convention
    assert (convention.kind, convention.relative_to, convention.position_scale) == ("delta", "state", 0.05)
    assert dataset.meta["libero"]["expert"]["tasks"] == summary
    part = demos.load_part(demos.part_file(making.parts, TASKS[1], 0))
    np.testing.assert_array_equal(dataset[1].action, part.action)
    np.testing.assert_array_equal(dataset[1].state, part.state)
    for key, video in part.images.items():
        assert dataset[1].frames(key).shape == video.shape


def test_parts_are_kept_exactly_and_damage_is_told(tmp_path: Path, attempts: list[tuple[str, int]]) -> None:
    making = demos.Making(tmp_path, size=16)
    demos.make_demos(making, TASKS[:1], 1)
    file = demos.part_file(tmp_path, TASKS[0], 0)
    wanted, found = made(attempts[1][1]), demos.load_part(file)
    for key in CAMERAS:
        np.testing.assert_array_equal(found.images[key], wanted.images[key])
    np.testing.assert_array_equal(found.action, wanted.action)
    assert json.loads(file.with_suffix(".json").read_text())["failed"] == ["not solved at the end"]
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(SimForcingError, match="damaged"):
        demos.load_part(file)


def test_recorded_actions_and_the_environments() -> None:
    action = np.float32([[0.1, -0.2, 0.3, 0, 0, 0, -1], [0, 0, 0, 0.5, 0, 0, 1]])
    recorded = to_recording(action)
    np.testing.assert_array_equal(recorded[:, 6], [1, 0])
    np.testing.assert_array_equal(from_recording(recorded), action)
    half = np.float32([[0, 0, 0, 0, 0, 0, 0.75]])
    assert from_recording(half)[0, 6] == -1 and from_recording(half, binarise=False)[0, 6] == -0.5


# -- in simulation -----------------------------------------------------------------------------------------------------


def solve(world: Libero, seed: int) -> bool:
    """One demonstration without pictures, which cost most of the time."""
    world.start_anywhere(seed)
    for _ in range(demos.WAIT):
        world.step(STAY_OPEN)
    expert = Expert(world, seed)
    for _ in range(demos.LONGEST):
        if expert.phase == "done":
            break
        world.step(expert.action())
    return world.solved()


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "index"), [("libero_object", 6), ("libero_spatial", 2)])
def test_the_expert_solves_tasks(suite: str, index: int) -> None:
    pytest.importorskip("libero")
    with Libero(suite_tasks(suite)[index], size=32) as world:
        assert Goal.of(world).relation == ("in" if suite == "libero_object" else "on")
        assert sum(solve(world, seed) for seed in range(3)) == 3


@pytest.mark.slow
def test_a_demonstration_with_pictures() -> None:
    """What is recorded is what was done: the same actions lead to the same states again."""
    pytest.importorskip("libero")
    with Libero(suite_tasks("libero_object")[1], size=32) as world:
        found = demos.perform(world, 1)
        assert isinstance(found, demos.Demonstration)
        assert found.images[AGENT].shape == (len(found.action), 32, 32, 3)
        assert set(np.unique(found.action[:, 6])) == {0.0, 1.0} and np.abs(found.action[:, :6]).max() <= 1
        world.start_anywhere(1)
        for _ in range(demos.WAIT):
            world.step(STAY_OPEN)
        for action, state in zip(from_recording(found.action), found.state, strict=True):
            np.testing.assert_array_equal(world.state(), state)
            world.step(action)
        assert world.solved()
        without = demos.perform(world, 1, look=False)
        assert isinstance(without, demos.Demonstration) and not without.images
        np.testing.assert_array_equal(without.action, found.action)


@pytest.mark.slow
def test_where_robot_and_camera_stand_is_what_the_twin_draws_by() -> None:
    """The twin's `grip_site` is where the simulator has it, and the camera sees it in the same pixel, mirrored."""
    pytest.importorskip("libero")
    import mujoco

    from simforcing.data.actions import to_poses
    from simforcing.twin.camera import Camera
    from simforcing.twin.robot import Robot

    robot = Robot.load("panda", ee="grip_site")
    for suite in ("libero_object", "libero_spatial"):
        with Libero(suite_tasks(suite)[0], size=64) as world:
            world.start_anywhere(0)
            stand = world.stand()
            model, data = world.control.sim.model._model, world.control.sim.data._data
            for _ in range(10):
                world.step(np.array([0.5, -0.8, -0.4, 0.1, 0.2, 0.6, -1.0]))
            q = np.array([data.qpos[model.joint(f"robot0_joint{i}").qposadr[0]] for i in range(1, 8)])
            state = world.state()  # of the last substep's beginning
            mujoco.mj_kinematics(model, data)
            place = np.array(data.site("gripper0_grip_site").xpos)
            view = np.array(data.camera("agentview").xpos)
        seen = Camera.from_dict(stand.camera)
        assert seen.mirrored and stand.base[:3] in ((-0.6, 0, 0), (-0.66, 0, 0.912))
        np.testing.assert_allclose(seen.pose[:3, 3], view - stand.base[:3], atol=1e-6)
        expected = to_poses(state[None], demos.state_of(stand))[0]
        reached = robot.fk_path(q[None])[0]
        np.testing.assert_allclose(reached[:3, 3], place - stand.base[:3], atol=2e-4)
        np.testing.assert_allclose(
            reached[:3, 3], expected[:3, 3], atol=3e-3
        )  # states are read before the last substep
        np.testing.assert_allclose(reached[:3, :3], expected[:3, :3], atol=0.02)


def test_the_suites_arena_is_told_only_where_it_is_one(tmp_path: Path) -> None:
    stand = Stand((-0.6, 0.0, 0.0, 0.0, 0.0, 0.0), {"fovy_degrees": 45.0})
    told = demos.meta_of(demos.Making(tmp_path), {}, stand)
    assert told["cameras"] == {AGENT: stand.camera}
    assert StateConvention.from_dict(told["state"]) == StateConvention(
        gripper_range=(0.0, 0.08), fingers=True, base=stand.base
    )
    assert not {"cameras", "state"} & set(demos.meta_of(demos.Making(tmp_path), {}, None))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rate", "--out", "x"], "give either --out"),
        ([], "give either --out"),
        (["--rate", "--parts", "x"], "so it has no --parts"),
    ],
)
def test_a_dataset_or_a_rate(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "demos", "--suite", "libero_object", "--episodes", "1", *words]) == 2
    assert says in capsys.readouterr().err
