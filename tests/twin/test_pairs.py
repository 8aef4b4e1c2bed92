"""Real episodes -> paired dataset, through Python and the command."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from simforcing.cli.main import main
from simforcing.data import REAL, SIM, Dataset, Episode, open_dataset
from simforcing.errors import SimForcingError
from simforcing.twin import pairs
from simforcing.twin.camera import Camera
from simforcing.twin.pairs import Conventions, choose_camera, pair
from simforcing.twin.render import ArmRenderer
from simforcing.twin.robot import Robot


@pytest.fixture(scope="module")
def source(shared: Path) -> Path:
    return shared / "data/lerobot_v30"


@pytest.fixture(scope="module")
def panda(shared: Path) -> Robot:
    return Robot.load(shared / "robots/panda/panda.urdf")


def changed(data: Dataset, change: dict[int, Episode]) -> Dataset:
    """The dataset with some episodes replaced."""
    return Dataset(
        data.root,
        fps=data.fps,
        robot=data.robot,
        cameras=data.cameras,
        action_convention=data.action_convention,
        meta=data.meta,
        lengths=data.lengths,
        tasks=data.tasks,
        state_names=data.state_names,
        action_names=data.action_names,
        load=lambda i: change.get(i, data[i]),
    )


def shortened(data: Dataset, count: int) -> dict[int, Episode]:
    """Every episode cut to its first `count` frames, so that drawing takes no time."""
    return {
        i: replace(e, state=e.state[:count], action=e.action[:count], timestamps=e.timestamps[:count])
        for i, e in enumerate(data)
    }


def out_of_reach(episode: Episode) -> Episode:
    state = episode.state.copy()
    state[2, 2] = 3.0
    return replace(episode, state=state)


def test_pair_makes_a_readable_paired_dataset(source: Path, panda: Robot, tmp_path: Path) -> None:
    out = tmp_path / "pairs"
    made = pair(source, out, panda, episodes=[0])
    assert (made.out, made.episodes, made.frames, made.skipped) == (out, 1, 33, ())
    assert made.worst_position < 2e-4
    data, real = open_dataset(out), open_dataset(source)[0]
    assert set(data.cameras) == {REAL, SIM}
    episode = data[0]
    assert (episode.length, episode.task, data.fps) == (33, real.task, 5.0)
    np.testing.assert_array_equal(episode.state, real.state)
    np.testing.assert_array_equal(episode.action, real.action)
    frames = episode.frames(REAL)
    assert frames.shape == episode.frames(SIM).shape == (33, 192, 320, 3)
    want = real.frames("observation.images.exterior_1")
    assert np.abs(frames.astype(int) - want).mean() < 3.0

    meta = json.loads((out / "meta/simforcing.json").read_text())
    assert meta["robot"] == {"name": "panda", "sha256": panda.sha256, "end_effector": "panda_link8"}
    assert meta["action"]["gripper"] == "closed_positive"
    assert meta["action"]["rotation"] == "euler_xyz"
    assert meta["camera"]["key"] == "observation.images.exterior_1"
    assert meta["episodes"][0]["position_error_mm"] < 0.2
    assert data.action_convention.gripper == "closed_positive"
    with Image.open(out / "qa/episode_000000.png") as sheet:
        assert sheet.size == (8 * 320, 3 * 192)


def test_simulated_arm_moves_where_the_states_move(source: Path, panda: Robot, tmp_path: Path) -> None:
    camera = Camera.look_at((1.6, -1.2, 0.9), (0.4, 0.0, 0.3), fovy=45.0, height=192, width=320)
    pair(source, tmp_path / "pairs", panda, camera=camera, episodes=[0], qa_episodes=0)
    episode = open_dataset(tmp_path / "pairs")[0]
    sim = episode.frames(SIM, [0, 12, 32])
    assert not (tmp_path / "pairs/qa").exists()
    background = sim[0, 2, 2].astype(int)
    arm = np.abs(sim.astype(int) - background).max(axis=-1) > 24
    assert 0.02 < arm.mean() < 0.3
    for mask, row in zip(arm, episode.state[[0, 12, 32]], strict=True):
        column, line = (int(v) for v in camera.project(row[None, :3].astype(float))[0])
        assert mask[line - 3 : line + 4, column - 3 : column + 4].mean() > 0.5  # the flange is drawn where it is
    assert (arm[0] != arm[2]).mean() > 0.01


MUJOCO_FIRST = """
import mujoco
import simforcing.twin
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 32, 32) as renderer:
    renderer.update_scene(data)
    assert renderer.render().max() > 0
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the renderer is chosen on Linux only")
def test_mujoco_may_be_imported_before_the_package() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    done = subprocess.run(
        [sys.executable, "-c", MUJOCO_FIRST], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


def test_gripper_closes_in_the_picture_and_mask_fits(panda: Robot) -> None:
    camera = Camera.look_at((1.2, -0.5, 0.7), (0.55, 0.0, 0.55), fovy=30.0, height=96, width=160)
    with ArmRenderer(panda, camera, 96, 160) as renderer:
        wide, shut = (renderer.picture(panda.home, opening) for opening in (1.0, 0.0))
        mask = renderer.mask(panda.home, 1.0)
        again = renderer.picture(panda.home, 1.0)
    assert (wide != shut).any(axis=-1).mean() > 0.001
    np.testing.assert_array_equal(wide, again)
    background = wide[~mask]
    assert len(np.unique(background[:20], axis=0)) == 1
    drawn = (np.abs(wide.astype(int) - background[0]) > 8).any(axis=-1)
    assert (drawn != mask).mean() < 0.03  # they differ at smoothed edges only


def test_bad_episodes_stop_or_are_counted(source: Path, panda: Robot, tmp_path: Path) -> None:
    real = open_dataset(source)
    short = shortened(real, 4)
    data = changed(real, {**short, 1: out_of_reach(short[1])})
    with pytest.raises(SimForcingError, match=r"episode 1 of .*frame 2: panda misses .* cm"):
        pair(data, tmp_path / "strict", panda)
    assert list(tmp_path.iterdir()) == []
    made = pair(data, tmp_path / "lenient", panda, skip_bad=True)
    assert made.episodes == 2
    assert [number for number, _ in made.skipped] == [1]
    meta = json.loads((tmp_path / "lenient/meta/simforcing.json").read_text())
    assert [row["source"] for row in meta["episodes"]] == [0, 2]
    assert "frame 2" in meta["skipped"][0]["reason"]
    assert open_dataset(tmp_path / "lenient")[1].task == real[2].task
    with pytest.raises(SimForcingError, match="all 1 episodes are out of reach"):
        pair(data, tmp_path / "none", panda, skip_bad=True, episodes=[1])


def test_existing_output_is_refused(source: Path, panda: Robot, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(SimForcingError, match="exists already"):
        pair(source, tmp_path / "kept", panda)
    assert (tmp_path / "kept").read_text() == "mine"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_is_left_after_an_interruption(
    source: Path, panda: Robot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def stop(*_: object) -> None:
        raise error

    monkeypatch.setattr(pairs, "contact_sheet", stop)
    real = open_dataset(source)
    with pytest.raises(type(error)):
        pair(changed(real, shortened(real, 2)), tmp_path / "pairs", panda)
    assert list(tmp_path.iterdir()) == []


def test_wrong_camera_and_shape(source: Path, panda: Robot, tmp_path: Path) -> None:
    data = open_dataset(source)
    assert choose_camera(data) == "observation.images.exterior_1"
    assert choose_camera(data, "wrist") == "observation.images.wrist"
    with pytest.raises(SimForcingError, match="no camera 'exterior_3'; did you mean"):
        choose_camera(data, "exterior_3")
    square = Camera.look_at((1, 1, 1), (0, 0, 0), fovy=50.0, height=256, width=256)
    with pytest.raises(SimForcingError, match="made for 256x256 pictures"):
        pair(source, tmp_path / "pairs", panda, camera=square)
    with pytest.raises(SimForcingError, match="no episode 7"):
        pair(source, tmp_path / "pairs", panda, episodes=[7])


def test_conventions_can_be_said(source: Path) -> None:
    convention, rotation, notes = Conventions("open_positive", "rotvec").resolve(open_dataset(source))
    assert (convention.gripper, convention.rotation, rotation, notes) == (
        "open_positive",
        "rotvec",
        "rotvec",
        [],
    )
    convention, rotation, notes = Conventions().resolve(open_dataset(source))
    assert (convention.gripper, rotation) == ("closed_positive", "euler_xyz")
    assert "--gripper" in notes[0]


def test_command_reports_and_refuses(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, robot = str(shared / "data/lerobot_v30"), str(shared / "robots/panda/panda.urdf")
    bad = tmp_path / "camera.json"
    bad.write_text('{"pose": 1}')
    for extra, says in (
        (["--robot", "nothing.urdf"], "no such file"),
        (["--robot", robot, "--camera-file", str(bad)], "missing key"),
        (["--robot", robot, "--camera", "top"], "no camera 'top'"),
        (["--robot", robot, "--ee", "claw"], "no body or site 'claw'"),
    ):
        assert main(["twin", "pair", source, str(tmp_path / "out"), *extra]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert says in error
        assert not (tmp_path / "out").exists()


def test_command_makes_pairs(
    source: Path,
    shared: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = open_dataset(source)
    monkeypatch.setattr(pairs, "open_dataset", lambda path: changed(real, shortened(real, 3)))
    robot = str(shared / "robots/panda/panda.urdf")
    assert main(["twin", "pair", str(source), str(tmp_path / "out"), "--robot", robot, "--camera", "exterior_2"]) == 0
    said = capsys.readouterr()
    assert "3 episodes, 9 frames; 'panda_link8' follows the state within 0." in said.out
    assert "render: 100 % 3 of 3 episodes" in said.err
    assert len(list((tmp_path / "out/qa").iterdir())) == 3
