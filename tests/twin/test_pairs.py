"""Real episodes -> paired dataset, through Python and the command."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from simforcing.cli.main import main
from simforcing.data import REAL, SIM, Dataset, Episode, StateConvention, open_dataset
from simforcing.data.convert import Wanted
from simforcing.errors import SimForcingError
from simforcing.twin import pairs, parts, qa
from simforcing.twin.calibrate import Source, _Reader
from simforcing.twin.camera import Camera
from simforcing.twin.pairs import Conventions, choose_camera, pair, stored_camera
from simforcing.twin.render import ArmRenderer, masked_first_frame
from simforcing.twin.replay import poses
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
        load=lambda i: change[i] if i in change else data[i],
        state_convention=data.state_convention,
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
    robot = {"name": "panda", "sha256": panda.sha256, "end_effector": "panda_link8", "bundled": False}
    assert meta["robot"] == robot
    assert meta["action"]["gripper"] == "closed_positive"
    assert meta["action"]["rotation"] == "euler_xyz"
    assert meta["camera"]["key"] == "observation.images.exterior_1"
    assert meta["episodes"][0]["position_error_mm"] < 0.2
    assert data.action_convention.gripper == "closed_positive"
    with Image.open(out / "qa/episode_000000.png") as sheet:
        assert sheet.size == (8 * 320, 3 * 192 + 200)
    row = meta["episodes"][0]
    assert row["motion_agreement"] > 0.5
    assert (row["flags"], row["motion_overlap"], row["frames_not_converged"]) == ([], None, 0)
    frames = pq.read_table(out / "qa/frames.parquet")
    assert frames.num_rows == 33
    assert frames["converged"].to_pylist() == [True] * 33
    assert "agreement" in (out / "qa/index.html").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["pairs"]


def test_simulated_arm_moves_where_the_states_move(source: Path, panda: Robot, tmp_path: Path) -> None:
    camera = Camera.look_at((1.6, -1.2, 0.9), (0.4, 0.0, 0.3), fovy=45.0, height=192, width=320)
    pair(source, tmp_path / "pairs", panda, camera=camera, episodes=[0], qa_episodes=0)
    episode = open_dataset(tmp_path / "pairs")[0]
    sim = episode.frames(SIM, [0, 12, 32])
    meta = json.loads((tmp_path / "pairs/meta/simforcing.json").read_text())
    assert meta["episodes"][0]["flags"]  # the camera is not where the real camera stood
    assert meta["episodes"][0]["motion_overlap"] < 0.5
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


def test_a_mirrored_camera_draws_the_mirrored_picture(panda: Robot) -> None:
    camera = Camera.look_at((1.2, -0.5, 0.7), (0.55, 0.0, 0.55), fovy=30.0, height=96, width=160)
    with ArmRenderer(panda, camera, 96, 160) as renderer:
        plain, mask = renderer.picture(panda.home), renderer.mask(panda.home)
        renderer.look_from(replace(camera, mirrored=True))
        np.testing.assert_array_equal(renderer.picture(panda.home), plain[:, ::-1])
        np.testing.assert_array_equal(renderer.mask(panda.home), mask[:, ::-1])
    assert (plain != plain[:, ::-1]).any()


def test_the_camera_that_a_dataset_knows_is_taken(source: Path, panda: Robot, tmp_path: Path) -> None:
    data = open_dataset(source)
    data = changed(data, shortened(data, 4))
    key = choose_camera(data)
    data.meta = {**data.meta, "cameras": {key: {**views()[1].to_dict(), "mirrored": True}}}
    pair(data, tmp_path / "own", panda, episodes=[0])
    made = open_dataset(tmp_path / "own")
    assert made.meta["camera"]["source"] == "known"
    assert made.meta["camera"]["mirrored"] is True
    pair(data, tmp_path / "given", panda, episodes=[0], camera=replace(views()[1], mirrored=True))
    np.testing.assert_array_equal(made[0].frames(SIM), open_dataset(tmp_path / "given")[0].frames(SIM))
    again = pair(open_dataset(tmp_path / "own"), tmp_path / "again", panda)
    assert open_dataset(again.out).meta["camera"]["source"] == "known"
    with pytest.raises(SimForcingError, match="are mirrored"):
        _Reader(data, panda, Source())
    for wrong, says in (([1], "must be a table"), ({"real": {}}, "knows of a camera 'real'; known: ")):
        with pytest.raises(SimForcingError, match=says):
            stored_camera(changed_meta(data, wrong), key)
    data.meta["cameras"][key]["fovy_degrees"] = 0
    with pytest.raises(SimForcingError, match=f"{key}: camera: fovy is 0"):
        pair(data, tmp_path / "wrong", panda, episodes=[0])


def changed_meta(data: Dataset, cameras: Any) -> Dataset:
    """The dataset with another table of cameras."""
    other = changed(data, {})
    other.meta = {**data.meta, "cameras": cameras}
    return other


def test_the_sign_of_a_gripper_of_two_fingers_is_the_actions_alone(source: Path) -> None:
    data = open_dataset(source)
    fingers = StateConvention(gripper_range=(0.0, 0.08), fingers=True)
    data.state_convention, data.meta = fingers, {k: v for k, v in data.meta.items() if k != "action"}
    for gripper in ("auto", "closed_positive"):
        action, state, _ = Conventions(gripper).resolve(data)
        assert state == fingers
    assert action.gripper == "closed_positive"
    assert Wanted(gripper="closed_positive", gripper_range=(-1.0, 1.0)).state(fingers) == fingers


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
    with pytest.raises(SimForcingError, match="all 1 episodes are out of reach or damaged"):
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

    monkeypatch.setattr(parts, "contact_sheet", stop)
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
    convention, state, notes = Conventions("open_positive", "rotvec").resolve(open_dataset(source))
    assert (convention.gripper, convention.rotation, state.gripper, state.rotation, notes) == (
        "open_positive",
        "rotvec",
        "open_positive",
        "rotvec",
        [],
    )
    convention, state, notes = Conventions().resolve(open_dataset(source))
    assert (convention.gripper, state.gripper, state.rotation) == ("closed_positive", "closed_positive", "euler_xyz")
    assert "--gripper" in notes[0]
    convention, state, notes = Conventions().resolve(open_dataset(source.parent / "droid"))
    assert (convention.gripper, state.gripper, notes) == (
        "closed_positive",
        "closed_positive",
        [],
    )  # its format says so


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
    monkeypatch.setattr(pairs, "open_checked", lambda path, **_: changed(real, shortened(real, 3)))
    robot = str(shared / "robots/panda/panda.urdf")
    assert main(["twin", "pair", str(source), str(tmp_path / "out"), "--robot", robot, "--camera", "exterior_2"]) == 0
    said = capsys.readouterr()
    assert "3 episodes, 9 frames; 'panda_link8' follows the state within 0." in said.out
    assert "render: 100 % 3 of 3 episodes" in said.err
    assert len(list((tmp_path / "out/qa").glob("*.png"))) == 3


def files(folder: Path) -> dict[str, bytes]:
    """Everything in a dataset that does not depend on how it was made."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_goes_on_where_it_stopped(
    source: Path, panda: Robot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = open_dataset(source)
    data = changed(real, shortened(real, 3))
    whole = pair(data, tmp_path / "whole", panda, qa_episodes=0)
    drawn: list[int] = []

    def draw(tools: parts.Tools, drawing: parts.Drawing) -> None:
        if len(drawn) == 2:
            raise KeyboardInterrupt
        drawn.append(drawing.number)
        parts.draw(tools, drawing)

    monkeypatch.setattr(pairs, "draw", draw)
    with pytest.raises(KeyboardInterrupt):
        pair(data, tmp_path / "pairs", panda, qa_episodes=0)
    assert not (tmp_path / "pairs").exists()
    drawn.pop()
    with pytest.raises(SimForcingError, match=r"pairs.parts: begun with another camera; give the same to go on"):
        pair(data, tmp_path / "pairs", panda, qa_episodes=0, camera_key="exterior_2")
    (tmp_path / "pairs.parts/episode_000002.npz.partial-1").write_bytes(b"half")
    made = pair(data, tmp_path / "pairs", panda, qa_episodes=0)
    assert drawn == [0, 2]  # 0 and 1 were finished, and only 2 was drawn again
    assert (made.episodes, made.frames) == (whole.episodes, whole.frames) == (3, 9)
    assert files(tmp_path / "pairs") == files(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs", "whole"]


def test_shards_fill_one_folder_and_are_put_together(source: Path, panda: Robot, tmp_path: Path) -> None:
    real = open_dataset(source)
    data = changed(real, shortened(real, 3))
    pair(data, tmp_path / "whole", panda, qa_episodes=0)
    first = pair(data, tmp_path / "pairs", panda, qa_episodes=0, shard=(1, 2))
    assert (first.episodes, first.left) == (2, 1)
    assert not (tmp_path / "pairs").exists()
    second = pair(data, tmp_path / "pairs", panda, qa_episodes=0, shard=(2, 2))
    assert (second.episodes, second.left) == (3, 0)
    pair(data, tmp_path / "pairs", panda, qa_episodes=0)
    assert files(tmp_path / "pairs") == files(tmp_path / "whole")
    with pytest.raises(SimForcingError, match="shard 3/2: give i/n"):
        pair(data, tmp_path / "more", panda, qa_episodes=0, shard=(3, 2))


@pytest.mark.skipif(sys.platform == "win32", reason="no file locks")
def test_two_runs_do_not_meet(source: Path, panda: Robot, tmp_path: Path) -> None:
    real = open_dataset(source)
    data = changed(real, shortened(real, 2))
    store = parts.Store(tmp_path / "pairs.parts")
    pair(data, tmp_path / "pairs", panda, qa_episodes=0, shard=(1, 3))
    with store.lock("2-of-3"):
        with pytest.raises(SimForcingError, match="another run works on it"):
            pair(data, tmp_path / "pairs", panda, qa_episodes=0)
        with pytest.raises(SimForcingError, match="another run works on it"):
            pair(data, tmp_path / "pairs", panda, qa_episodes=0, shard=(2, 3))
        pair(data, tmp_path / "pairs", panda, qa_episodes=0, shard=(3, 3))


def test_damaged_parts_are_named(source: Path, panda: Robot, tmp_path: Path) -> None:
    real = open_dataset(source)
    data = changed(real, shortened(real, 2))
    pair(data, tmp_path / "pairs", panda, qa_episodes=0, shard=(1, 1))
    (tmp_path / "pairs.parts/episode_000001.npz").write_bytes(b"torn")
    with pytest.raises(SimForcingError, match=r"episode_000001.npz: damaged .*; delete it and the .json beside it"):
        pair(data, tmp_path / "pairs", panda, qa_episodes=0)


def test_first_frame_from_the_real_one(source: Path, panda: Robot, tmp_path: Path) -> None:
    real = open_dataset(source)
    data = changed(real, shortened(real, 2))
    with pytest.raises(SimForcingError, match="masked first frame needs a camera file that fits, or arm masks"):
        pair(data, tmp_path / "pairs", panda, qa_episodes=0, first_frame="masked")
    arm = np.zeros((192, 320), np.uint8)
    arm[40:150, 100:220] = 255
    masks = tmp_path / "masks"
    masks.mkdir()
    Image.fromarray(arm).save(masks / "episode_000000.png")
    pair(data, tmp_path / "pairs", panda, qa_episodes=0, first_frame="masked", arm_masks=masks, episodes=[0])
    episode = open_dataset(tmp_path / "pairs")[0]
    (sim, later), picture = episode.frames(SIM), episode.frames(REAL, [0])[0]
    inside, outside = np.abs(sim.astype(int) - picture)[45:145, 105:215], sim[:30, :80].reshape(-1, 3)
    assert inside.mean() < 4.0
    assert np.abs(outside.astype(int) - later[2, 300]).max() < 8  # the background of all simulated frames
    with pytest.raises(SimForcingError, match=r"arm mask .*episode_000001.png: cannot be read"):
        pair(data, tmp_path / "more", panda, qa_episodes=0, first_frame="masked", arm_masks=masks, episodes=[1])


def test_masked_first_frame_has_the_background_of_the_renderer(panda: Robot) -> None:
    camera = Camera.look_at((1.2, -0.5, 0.7), (0.55, 0.0, 0.55), fovy=30.0, height=64, width=96)
    with ArmRenderer(panda, camera, 64, 96) as renderer:
        drawn, mask = renderer.picture(panda.home, 1.0), renderer.mask(panda.home, 1.0)
    cut = masked_first_frame(drawn, mask)
    np.testing.assert_array_equal(cut[mask], drawn[mask])
    assert np.abs(cut[0, 0].astype(int) - drawn[0, 0]).max() <= 1
    with pytest.raises(SimForcingError, match="arm mask is 64x96, the picture 96x64"):
        masked_first_frame(drawn.transpose(1, 0, 2), mask)


def test_wrong_pairs_are_flagged(source: Path, panda: Robot, tmp_path: Path) -> None:
    real = open_dataset(source)
    whole = real[0]
    last = real[2]
    backwards = replace(whole, state=whole.state[::-1].copy())
    stranger = replace(last, state=np.resize(real[1].state[::-1], last.state.shape))
    made = pair(
        changed(real, {0: backwards, 2: stranger}),
        tmp_path / "pairs",
        panda,
        camera_key="exterior_2",
        episodes=[0, 2],
        qa_episodes=0,
    )
    assert [number for number, _ in made.flagged] == [0, 2]
    rows = json.loads((tmp_path / "pairs/meta/simforcing.json").read_text())["episodes"]
    assert rows[0]["flags"] == ["reversed"]
    assert "backwards in time" in rows[0]["reasons"][0]


def test_swapped_episodes_are_traced_to_each_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    motions = [qa.computed(np.cumsum(rng.normal(0, 0.02, (60, 5, 3)), axis=0)) for _ in range(4)]
    store = parts.Store(tmp_path)
    order = [1, 0, 2, 3]  # the simulations of 0 and 1 changed places
    rows = []
    for i, motion in enumerate(motions):
        other = motions[order[i]]
        path = parts.JointPath(*[np.zeros((60, 1))], *[np.zeros(60)] * 3, *[np.zeros(60, bool)] * 2)
        check = qa.examine(motion, other, calibrated=False)
        views = {"real": motion, "sim": other, "arm": other}
        store.save(i, {**path.summary(), **check.to_dict()}, np.zeros((60, 2, 2, 3), np.uint8), path, views)
        rows.append(store.summary(i))
    pairs.find_swapped(store, rows)
    assert ["swapped" in row["flags"] for row in rows] == [True, True, False, False]
    assert "the simulation of episode 1" in rows[0]["reasons"][-1]
    assert "the simulation of episode 0" in rows[1]["reasons"][-1]


def test_data_without_states_follow_their_actions(shared: Path, tmp_path: Path) -> None:
    start = poses(np.array([[0.2, 0.0, 0.2, 0.0, 0.3, 0.0, 0.0]]), "rotvec")[0]
    widowx = Robot.load("widowx250s")
    made = pair(shared / "data/bridge", tmp_path / "pairs", widowx, follow="action", start=start, episodes=[4])
    assert (made.episodes, made.frames) == (1, 27)
    data, source = open_dataset(tmp_path / "pairs"), open_dataset(shared / "data/bridge")
    np.testing.assert_allclose(data[0].state[0, :3], [0.2, 0.0, 0.2], atol=1e-6)
    moved = np.cumsum(source[4].action[:-1, :3], axis=0) + data[0].state[0, :3]
    np.testing.assert_allclose(data[0].state[1:, :3], moved, atol=1e-5)
    np.testing.assert_array_equal(data[0].action, source[4].action)
    assert data.action_convention == source.action_convention


def test_several_workers_need_paths(source: Path, panda: Robot, tmp_path: Path) -> None:
    with pytest.raises(SimForcingError, match="several workers need dataset and robot as paths"):
        pair(open_dataset(source), tmp_path / "pairs", panda, workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_two_workers_make_the_same(
    source: Path, panda: Robot, tmp_path: Path, engine: Literal["processes", "ray"]
) -> None:
    if engine == "ray":
        pytest.importorskip("ray", reason="needs the optional package ray")
    pair(source, tmp_path / "one", panda)
    made = pair(source, tmp_path / "two", panda, workers=2, engine=engine)
    assert made.episodes == 3
    assert files(tmp_path / "one") == files(tmp_path / "two")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_command_goes_on(source: Path, shared: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "simforcing.cli.main", "twin", "pair", str(source), str(tmp_path / "pairs")]
    command += ["--robot", str(shared / "robots/panda/panda.urdf"), "--workers", "2"]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not list((tmp_path / "pairs.parts").glob("episode_*.json")) and time.monotonic() < until:
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    running.wait(10)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "pairs.parts").glob("episode_*.json")}
    assert kept
    assert len(kept) < 3
    shown = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert shown.returncode == 0, shown.stderr
    assert f"render: 100 % {3 - len(kept)} of {3 - len(kept)} episodes" in shown.stderr
    assert len(open_dataset(tmp_path / "pairs")) == 3


def views() -> tuple[Camera, Camera]:
    """Two cameras of the pictures' size."""
    left = Camera.look_at((0.2, -0.8, 0.6), (0.4, 0.0, 0.2), fovy=60, height=192, width=320)
    return left, Camera.look_at((0.2, 0.8, 0.6), (0.4, 0.0, 0.2), fovy=50, height=192, width=320)


@pytest.mark.parametrize("workers", [1, 2])
def test_each_episode_is_seen_from_its_own_camera(
    source: Path, shared: Path, panda: Robot, tmp_path: Path, workers: int
) -> None:
    robot = str(shared / "robots/panda/panda.urdf")
    for number, view in zip((0, 2), views(), strict=True):
        view.save(tmp_path / f"camera_{number:06d}.json")
    words = ["twin", "pair", str(source), "--robot", robot, "--camera-file", str(tmp_path / "camera.json")]
    assert main([*words[:3], str(tmp_path / "each"), *words[3:], "--skip-bad", "--workers", str(workers)]) == 0
    made = open_dataset(tmp_path / "each")
    assert [row["source"] for row in made.meta["episodes"]] == [0, 2]
    assert "no camera file for episode 1" in made.meta["skipped"][0]["reason"]
    for episode, number, view in zip(made, (0, 2), views(), strict=True):
        pair(source, tmp_path / f"alone {number}", panda, camera=view, episodes=[number])
        alone = open_dataset(tmp_path / f"alone {number}")[0]
        off = episode.frames(SIM).astype(int) - alone.frames(SIM)
        assert abs(off).mean() < 0.1  # a video of two episodes and one of one are not compressed to the same bytes


def test_cameras_of_episodes_that_do_not_suit_are_refused(
    source: Path, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    robot = str(shared / "robots/panda/panda.urdf")
    words = ["twin", "pair", str(source), str(tmp_path / "out"), "--robot", robot]
    words += ["--camera-file", str(tmp_path / "camera.json")]
    views()[0].save(tmp_path / "camera_000007.json")
    assert main(words) == 2
    assert "none of the cameras is of one of its episodes" in capsys.readouterr().err
    views()[0].save(tmp_path / "camera_000000.json")
    assert main(words) == 2
    assert "no camera file for episode 1" in capsys.readouterr().err
    views()[0].save(tmp_path / "camera.json")
    assert main(words) == 2
    assert "there are also cameras of single episodes (camera_000000.json)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-error-cm", "nan"], "largest miss nan cm, 5 degrees: give both above zero"),
        (["--max-error-degrees", "0"], "largest miss 1 cm, 0 degrees: give both above zero"),
        (["--qa-episodes", "-1"], "-1 episodes with a contact sheet"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert main(["twin", "pair", str(source), str(tmp_path / "out"), "--robot", "panda", *options]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_into_the_source_or_through_a_dead_link(source: Path, panda: Robot, tmp_path: Path) -> None:
    with pytest.raises(SimForcingError, match=r"lies inside .*, which it is made from"):
        pair(source, source / "pairs", panda)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SimForcingError, match="exists already"):
        pair(source, tmp_path / "link", panda)


def test_a_run_does_not_go_on_with_drawings_of_other_data(source: Path, panda: Robot, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(source, copy)
    assert pair(copy, tmp_path / "out", panda, shard=(1, 3)).left == 2
    table = next((copy / "data").rglob("*.parquet"))
    pq.write_table(pq.read_table(table), table, compression="none")
    with pytest.raises(SimForcingError, match="begun with another dataset"):
        pair(copy, tmp_path / "out", panda, shard=(2, 3))
    shutil.rmtree(copy)
    shutil.copytree(source, copy)
    (tmp_path / "out.parts/plan.json").write_text("{")
    with pytest.raises(SimForcingError, match=r"plan\.json: cannot be read"):
        pair(copy, tmp_path / "out", panda, shard=(2, 3))
