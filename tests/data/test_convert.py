"""Conversion to LeRobot v3.0: real sets in every format, and what becomes of their numbers."""

import json
import shutil

import numpy as np
import pytest

from simforcing.data import REAL, SIM, StateConvention, actions, open_dataset
from simforcing.data.convert import Wanted, convert
from simforcing.errors import SimForcingError


@pytest.fixture(scope="module")
def franka(shared, tmp_path_factory):
    """A real set with wraps at pi, converted to deltas of the state with quaternions."""
    out = tmp_path_factory.mktemp("convert") / "d"
    wanted = Wanted(kind="delta", relative_to="state", frame="tool", rotation="quaternion", gripper="closed_positive")
    convert(shared / "data" / "lerobot_v21", out, wanted)
    return open_dataset(out)


def test_converted_and_converted_back(franka, shared, tmp_path):
    source = open_dataset(shared / "data" / "lerobot_v21")
    assert franka.action_names == ("x", "y", "z", "qx", "qy", "qz", "qw", "gripper") and franka.format == "LeRobot v3.0"
    assert franka.action_convention.relative_to == "state" and franka.state_convention.rotation == "quaternion"
    assert np.abs(franka[1].action[:, :3]).max() < 0.2  # changes, not places
    made = convert(franka.root, tmp_path / "back", Wanted("absolute", rotation="euler_xyz", gripper="open_positive"))
    assert (made.episodes, made.frames, made.skipped) == (3, 194, ())
    back = open_dataset(tmp_path / "back")
    for first, last in zip(source, back, strict=True):
        assert first.task == last.task
        for name in ("state", "action"):
            mine, theirs = getattr(first, name), getattr(last, name)
            np.testing.assert_allclose(theirs[:, [0, 1, 2, 6]], mine[:, [0, 1, 2, 6]], atol=2e-5)
            np.testing.assert_allclose(np.exp(1j * theirs[:, 3:6]), np.exp(1j * mine[:, 3:6]), atol=2e-4)
            assert np.abs(np.diff(theirs[:, 3:6], axis=0)).max() < 1.0  # no wraps at pi any more
        key = source.cameras[2]
        assert np.abs(first.frames(key, [0, 9]).astype(int) - last.frames(key, [0, 9])).mean() < 4


def test_unwrapped_by_default_and_as_stored_on_request(new_writer, frames, tmp_path):
    names = actions.names(StateConvention("euler_xyz"))
    with new_writer(tmp_path / "s", state_names=names, action_names=names) as writer:
        for k, start in enumerate((3.0, -3.0)):
            rows = np.full((8, 7), 0.25, np.float32)
            rows[:, 3] = (start + 0.1 * np.arange(8) * (-1) ** k + np.pi) % (2 * np.pi) - np.pi
            rows[:, 5] = 0.3 * k
            writer.add_episode({REAL: frames(8, 32, 48), SIM: frames(8, 32, 48)}, rows, rows + np.float32(0.01), "x")
    convert(tmp_path / "s", tmp_path / "raw", Wanted(unwrap=False))
    convert(tmp_path / "s", tmp_path / "smooth")
    source, raw, smooth = (open_dataset(tmp_path / name) for name in ("s", "raw", "smooth"))
    for k in range(2):
        np.testing.assert_array_equal(raw[k].state, source[k].state)
        np.testing.assert_array_equal(raw[k].action, source[k].action)
        np.testing.assert_array_equal(smooth[k].state[:, [0, 1, 2, 4, 5, 6]], source[k].state[:, [0, 1, 2, 4, 5, 6]])
    assert np.ptp(np.concatenate([e.state[:, 3] for e in source])) > 6
    roll = np.concatenate([np.concatenate([e.state[:, 3], e.action[:, 3]]) for e in smooth])
    assert np.ptp(roll) < 1.2 and np.abs(roll).max() < np.pi + 1


def test_half_the_rate(write_dataset, tmp_path):
    root = write_dataset(tmp_path / "s", lengths=(9,), state_names=actions.names(StateConvention()))
    made = convert(root, tmp_path / "d", Wanted(fps=2.5, unwrap=False))
    before, after = open_dataset(root)[0], open_dataset(tmp_path / "d")[0]
    assert made.frames == 5 and after.fps == 2.5
    np.testing.assert_allclose(after.state, before.state[::2], atol=1e-6)
    poses = [actions.to_poses(rows, made.action) for rows in (after.action, before.action[[1, 3, 5, 7, 8]])]
    np.testing.assert_allclose(*poses, atol=1e-5)  # each action is the last one before the next kept row
    assert np.abs(after.frames(SIM).astype(int) - before.frames(SIM)[::2]).mean() < 4
    with pytest.raises(SimForcingError, match="5 rows a second cannot become 3; give a divisor"):
        convert(root, tmp_path / "e", Wanted(fps=3))


def test_bridge_needs_states_and_can_add_up_deltas(shared, tmp_path):
    root = tmp_path / "s"
    root.mkdir()
    for name in ("000000005", "000000007"):
        for suffix in ("npz", "mp4"):
            shutil.copy(shared / "data" / "bridge" / f"{name}.{suffix}", root)
    with pytest.raises(SimForcingError, match=r"no states in it.*--state-from-actions"):
        convert(root, tmp_path / "d")
    convert(root, tmp_path / "d", Wanted(state_from_actions=True))
    source, made = open_dataset(root), open_dataset(tmp_path / "d")
    np.testing.assert_array_equal(made[1].action, source[1].action)
    np.testing.assert_allclose(made[1].state[0, :6], 0)
    np.testing.assert_allclose(np.diff(made[1].state[:, :3], axis=0), source[1].action[:-1, :3], atol=1e-5)
    assert made.action_convention == source.action_convention and made.cameras == (REAL,)


def test_paired_layout_becomes_a_paired_dataset(write_paired, tmp_path):
    convert(write_paired(tmp_path / "s"), tmp_path / "d")
    source, made = open_dataset(tmp_path / "s"), open_dataset(tmp_path / "d")
    assert made.cameras == (REAL, SIM) and made.lengths == source.lengths and made.tasks == ("do 0", "do 1")
    assert made.action_convention == source.action_convention
    np.testing.assert_array_equal(made[1].action, source[1].action)
    stored = json.loads((tmp_path / "d/meta/simforcing.json").read_text())
    assert stored["source"] == {"dataset": "s", "format": "paired MP4 [sim|real]"}
    assert stored["state"]["rotation"] == "euler_xyz"


def test_rows_that_are_no_poses_are_kept(write_dataset, tmp_path):
    names = [f"joint_{i}" for i in range(7)]
    root = write_dataset(tmp_path / "s", lengths=(9,), state_names=names, action_names=names)
    convert(root, tmp_path / "d", Wanted(fps=2.5))
    source, made = open_dataset(root), open_dataset(tmp_path / "d")
    np.testing.assert_array_equal(made[0].state, source[0].state[::2])
    np.testing.assert_array_equal(made[0].action, source[0].action[[1, 3, 5, 7, 8]])
    assert made.state_names == tuple(names)
    with pytest.raises(SimForcingError, match="rotation can only be changed of poses"):
        convert(root, tmp_path / "e", Wanted(rotation="rotvec"))
    assert not (tmp_path / "e").exists()


@pytest.mark.slow
def test_the_one_whole_episode_of_a_broken_set(shared, tmp_path):
    root = shared / "data/odd/lerobot_g1_v21"
    made = convert(root, tmp_path / "d", skip_bad=True)
    source, data = open_dataset(tmp_path / "d"), made
    assert (data.episodes, len(data.skipped), source[0].action.shape) == (1, 99, (221, 26))
    assert "kLeftElbow" in source.state_names


def test_errors_are_refused_and_nothing_is_left(shared, tmp_path):
    with pytest.raises(SimForcingError, match="data file is missing"):
        convert(shared / "data/odd/lerobot_g1_v21", tmp_path / "d")
    (tmp_path / "there").mkdir()
    with pytest.raises(SimForcingError, match="exists already"):
        convert(shared / "data" / "lerobot_v30", tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("fps", [0.0, -5.0, float("nan"), float("inf")])
def test_a_rate_is_above_zero(fps: float) -> None:
    with pytest.raises(SimForcingError, match="give a rate above zero"):
        Wanted(fps=fps)


@pytest.mark.parametrize("ends", [(0.0, float("inf")), (1.0, 1.0), (float("nan"), 1.0)])
def test_a_gripper_range_has_two_ends(ends: tuple[float, float]) -> None:
    with pytest.raises(SimForcingError, match="give two different numbers"):
        Wanted(gripper_range=ends)


def test_nothing_is_written_into_the_source(franka) -> None:
    with pytest.raises(SimForcingError, match="lies inside"):
        convert(franka.root, franka.root / "converted")
