"""LIBERO's tasks in simulation: which is meant, what is drawn, that a trial depends on nothing before it."""

from pathlib import Path

import mujoco
import numpy as np
import pytest

from simforcing.errors import InputError, SimForcingError
from simforcing.policy import libero_env
from simforcing.policy.libero_env import (
    AGENT,
    CAMERAS,
    PACKAGES,
    WRIST,
    Libero,
    Task,
    choose,
    initial_states,
    out_of_sight,
    suite_tasks,
)
from simforcing.policy.libero_numbers import STAY_OPEN

WORDS = ("pick up the milk", "pick up the butter", "pick up the butter knife")
TASKS = [Task("libero_object", i, words, Path("a.bddl"), Path("a.npz")) for i, words in enumerate(WORDS)]


def test_which_tasks_are_meant() -> None:
    assert choose(TASKS, []) == TASKS
    assert choose(TASKS, ["2", "Milk", "0"]) == [TASKS[2], TASKS[0]]
    for word, what in (("butter", "several of: 1"), ("cheese", "none of: 0"), ("7", "none of: 0")):
        with pytest.raises(SimForcingError, match=f"task '{word}' means {what}"):
            choose(TASKS, [word])
    with pytest.raises(SimForcingError, match=r"suite 'libero_objects': did you mean 'libero_object'\?"):
        suite_tasks("libero_objects")


def test_what_a_camera_cannot_see() -> None:
    """A camera at the origin that looks along +x, field of view 60 degrees."""
    places = {"ahead": (2, 0, 0), "behind": (-2, 0, 0), "left": (0.5, 3, 0), "edge": (2, 1.3, 0), "high": (1, 0, 2)}
    balls = "".join(f'<geom name="{n}" type="sphere" size=".2" pos="{x} {y} {z}"/>' for n, (x, y, z) in places.items())
    camera = '<camera name="c" pos="0 0 0" xyaxes="0 -1 0 0 0 1" fovy="60"/>'
    floor = '<geom name="floor" type="plane" size="1 1 .1" pos="-5 0 -9"/>'
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{balls}{camera}{floor}</worldbody></mujoco>")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    hidden = out_of_sight(model, data, "c")
    assert [model.geom(i).name for i in np.flatnonzero(hidden)] == ["behind", "left", "high"]


# -- in simulation -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    pytest.importorskip("libero")
    return suite_tasks("libero_object")


@pytest.mark.slow
def test_suites(tasks: list[Task]) -> None:
    assert tasks[0].instruction == "pick up the alphabet soup and place it in the basket"
    for suite in ("libero_spatial", "libero_goal", "libero_10"):
        assert [task.index for task in suite_tasks(suite)] == list(range(10))
    assert all(len(initial_states(task)) == 50 for task in tasks)


@pytest.mark.slow
def test_a_trial_depends_on_its_number_alone(tasks: list[Task]) -> None:
    def run(world: Libero, trial: int) -> np.ndarray:
        world.start(trial, 42)
        for _ in range(6):
            world.step(STAY_OPEN)
            world.step(np.array([0.5, -0.5, -0.5, 0, 0, 0.1, 1]))
        return np.concatenate([world.state(), *(view.ravel() for view in world.look().images.values())])

    with Libero(tasks[0], size=48) as world:
        first, second = run(world, 0), run(world, 1)
        assert not np.array_equal(first, second)
        np.testing.assert_array_equal(run(world, 0), first)
        assert not world.solved()
        found = world.fingerprint()
        assert set(PACKAGES) < set(found) and ":" in found["renderer"]
        with pytest.raises(InputError, match="trial 50: libero_object-00 has initial states 0 to 49"):
            world.start(50, 42)
    with Libero(tasks[0], size=48) as another:
        np.testing.assert_array_equal(run(another, 1), second)
        assert another.fingerprint() == found


@pytest.mark.slow
def test_pictures(tasks: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    """As robosuite draws them, turned by 180 degrees; leaving out what is out of sight changes no pixel."""
    with Libero(tasks[0], size=64) as world:
        world.start(0, 42)
        for _ in range(5):
            world.step(np.array([0.3, 0.8, -0.3, 0, 0, 0.2, -1]))
        seen = world.look()
        assert list(seen.images) == [AGENT, WRIST] and seen.state.shape == (8,)
        monkeypatch.setattr(libero_env, "out_of_sight", lambda model, data, camera: np.zeros(model.ngeom, bool))
        for key, view in world.look().images.items():
            np.testing.assert_array_equal(seen.images[key], view)
            drawn = world.control.sim.render(camera_name=CAMERAS[key], width=64, height=64)
            np.testing.assert_array_equal(view, drawn[::-1, ::-1])
