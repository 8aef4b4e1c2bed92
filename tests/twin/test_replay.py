"""States and actions as targets and joint paths; the frame that DROID's cartesian states belong to."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.spatial.transform import Rotation

from simforcing.data import ActionConvention, Dataset, Episode, StateConvention, open_dataset
from simforcing.data.actions import changes, convert_states, from_poses
from simforcing.errors import SimForcingError
from simforcing.twin.replay import (
    Tolerance,
    UnreachableError,
    action_targets,
    infer_gripper,
    joint_path,
    match_frames,
    openings,
    poses,
    state_convention,
)
from simforcing.twin.robot import Robot

EULER = StateConvention(rotation="euler_xyz", gripper="closed_positive")


@pytest.fixture(scope="module")
def panda(shared: Path) -> Robot:
    return Robot.load(shared / "robots/panda/panda.urdf")


@pytest.fixture(scope="module")
def droid(shared: Path) -> Dataset:
    return open_dataset(shared / "data/lerobot_v30")


@pytest.fixture(scope="module")
def joints(droid: Dataset) -> np.ndarray:
    """Recorded joint positions of all rows."""
    table = pq.read_table(droid.root / "data/chunk-000/file-000.parquet")
    return np.array(table["observation.state.joint_position"].to_pylist())


def states(droid: Dataset) -> np.ndarray:
    return np.concatenate([episode.state for episode in droid])


def test_cartesian_states_are_those_of_panda_link8(panda: Robot, droid: Dataset, joints: np.ndarray) -> None:
    reported = poses(states(droid), "euler_xyz")
    best = match_frames(panda, joints, reported)[0]
    assert best.name == "panda_link8" == panda.ee_name
    assert best.size < 1e-5  # no tool offset
    assert best.position_residual < 1e-5
    assert np.degrees(best.rotation_residual) < 1e-3
    found = panda.fk_path(joints)
    assert np.abs(found[:, :3, 3] - reported[:, :3, 3]).max() < 1e-6  # metres
    tcp = next(m for m in match_frames(panda, joints[:5], reported[:5]) if m.name == "panda_hand_tcp")
    np.testing.assert_allclose(tcp.offset[:3, 3], [0, 0, -0.1034], atol=1e-5)


def test_real_states_give_the_recorded_arm(panda: Robot, droid: Dataset, joints: np.ndarray) -> None:
    episode = droid[0]
    path = joint_path(panda, episode, droid.action_convention, state=EULER)
    assert path.position_error.max() < 2e-4
    assert np.degrees(path.rotation_error.max()) < 0.1
    back = panda.fk_path(path.q)
    assert np.abs(back[:, :3, 3] - episode.state[:, :3]).max() < 2e-4
    # a seventh joint is free: the elbow is near the real one, not on it
    assert np.degrees(np.abs(path.q - joints[: episode.length]).max()) < 6.0
    assert np.degrees(np.abs(np.diff(path.q, axis=0)).max()) < 30.0
    assert path.summary()["frames"] == episode.length


def test_offset_moves_the_followed_frame(panda: Robot, droid: Dataset) -> None:
    tcp = Robot.load(panda.source, ee="panda_hand_tcp")
    offset = np.eye(4)
    offset[:3, :3] = Rotation.from_rotvec([0, 0, np.pi / 4]).as_matrix()
    offset[:3, 3] = [0, 0, -0.1034]  # panda_link8 as the tool centre sees it
    convention = droid.action_convention
    path = joint_path(tcp, droid[0], convention, state=EULER, offset=offset)
    flange = panda.fk_path(path.q)
    assert np.abs(flange[:, :3, 3] - droid[0].state[:, :3]).max() < 2e-4


def test_absolute_actions_lead_to_the_next_frame(panda: Robot, droid: Dataset) -> None:
    episode, convention = droid[0], droid.action_convention
    path = joint_path(panda, episode, convention, state=EULER, follow="action")
    back = panda.fk_path(path.q)[:, :3, 3]
    assert np.abs(back[0] - episode.state[0, :3]).max() < 2e-4
    assert np.abs(back[1:] - episode.action[:-1, :3]).max() < 2e-4


@pytest.mark.parametrize("frame", ["base", "tool"])
@pytest.mark.parametrize("relative_to", ["state", "target"])
def test_deltas_recover_the_path(frame: str, relative_to: str) -> None:
    random = np.random.default_rng(0)
    rows = np.column_stack([random.normal(size=(6, 3)), random.normal(size=(6, 3)), np.zeros(6)])
    path = poses(rows, "rotvec")
    actions = np.zeros((6, 7))
    for i in range(5):
        if frame == "tool":
            change = np.linalg.inv(path[i]) @ path[i + 1]
            move, turn = change[:3, 3], change[:3, :3]
        else:
            move, turn = path[i + 1, :3, 3] - path[i, :3, 3], path[i + 1, :3, :3] @ path[i, :3, :3].T
        actions[i, :3], actions[i, 3:6] = move, Rotation.from_matrix(turn).as_rotvec()
    convention = ActionConvention(kind="delta", relative_to=relative_to, frame=frame)  # type: ignore[arg-type]
    np.testing.assert_allclose(action_targets(path, actions, convention), path, atol=1e-9)
    shifted = path.copy()
    shifted[2, 0, 3] += 1.0  # a state away from its target
    moved = action_targets(shifted, actions, convention)[3, 0, 3] - path[3, 0, 3]
    assert moved == pytest.approx(1.0 if relative_to == "state" else 0.0, abs=1e-9)


def test_absolute_poses_in_the_tool_frame_are_refused() -> None:
    with pytest.raises(SimForcingError, match="frame = base"):
        action_targets(np.eye(4)[None], np.zeros((1, 7)), ActionConvention(frame="tool"))


def test_openings() -> None:
    convention = ActionConvention(gripper="closed_positive", gripper_range=(-1.0, 1.0))
    np.testing.assert_allclose(openings(np.array([-1.0, 0.0, 1.0, 5.0]), convention), [1.0, 0.5, 0.0, 0.0])
    np.testing.assert_allclose(openings(np.array([0.0, 0.25]), ActionConvention()), [0.0, 0.25])


def test_conventions_of_droid_are_recognised(droid: Dataset) -> None:
    assert infer_gripper(droid) == "closed_positive"  # 0 is open there
    assert state_convention(droid, ActionConvention(rotation="rotvec")).rotation == "euler_xyz"


def moved(episode: Episode, by: float) -> Episode:
    state = episode.state.copy()
    state[7:10, 0] += by
    return replace(episode, state=state)


def test_unreachable_pose_names_episode_frame_and_miss(panda: Robot, droid: Dataset) -> None:
    with pytest.raises(UnreachableError) as caught:
        joint_path(panda, moved(droid[0], 0.6), droid.action_convention, state=EULER)
    text = str(caught.value)
    assert text.startswith(f"episode 0 of {droid.root}, frame ")
    assert int(text.split("frame ")[1].split(":")[0]) in (7, 8, 9)
    assert float(text.split("by ")[1].split(" cm")[0]) > 5.0
    assert "3 of 33 frames" in text
    assert "--skip-bad" in text
    lenient = Tolerance(position=1.0, rotation=4.0)
    path = joint_path(panda, moved(droid[0], 0.6), droid.action_convention, state=EULER, tolerance=lenient)
    assert path.position_error[7:10].min() > 0.05
    assert path.position_error[10:].max() < 1e-3


def test_other_widths_are_refused(panda: Robot, droid: Dataset) -> None:
    wide = replace(droid[0], action=np.zeros((33, 8), np.float32))
    with pytest.raises(SimForcingError, match="action has 8 numbers a row; replay needs 7"):
        joint_path(panda, wide, droid.action_convention, state=EULER)


def test_every_frame_says_whether_it_was_reached(panda: Robot, droid: Dataset) -> None:
    lenient = Tolerance(position=1.0, rotation=4.0)
    path = joint_path(panda, moved(droid[0], 0.6), droid.action_convention, state=EULER, tolerance=lenient)
    assert set(np.flatnonzero(~path.converged)) == {7, 8, 9}
    assert set(np.flatnonzero(path.beyond_limits)) <= {7, 8, 9}
    assert path.summary()["frames_not_converged"] == 3
    assert path.summary()["frames_beyond_limits"] == int((path.at_limit & ~path.converged).sum())


@pytest.mark.parametrize("frame", ["base", "tool"])
def test_deltas_are_added_up_from_a_start_pose_where_there_is_no_state(
    panda: Robot, droid: Dataset, frame: Literal["base", "tool"]
) -> None:
    episode = droid[0]
    measured = poses(episode.state, "euler_xyz")
    wanted = ActionConvention("delta", "state", frame, "rotvec", "closed_positive", hz=5.0)
    steps = np.concatenate([measured[1:], measured[-1:]])  # each action leads to the next measured pose
    action = from_poses(changes(steps, measured, wanted), np.zeros(len(steps)), wanted)
    bare = replace(episode, state=np.empty((episode.length, 0), np.float32), action=action)
    with pytest.raises(SimForcingError, match="no state to follow; use --follow action"):
        joint_path(panda, bare, wanted, state=EULER)
    with pytest.raises(SimForcingError, match="no state; say where the arm starts with --start-pose"):
        joint_path(panda, bare, wanted, state=EULER, follow="action")
    path = joint_path(panda, bare, wanted, state=EULER, follow="action", start=measured[0])
    assert np.abs(panda.fk_path(path.q)[:, :3, 3] - measured[:, :3, 3]).max() < 5e-4


def test_units_and_quaternions_are_read(panda: Robot, droid: Dataset) -> None:
    episode = droid[0]
    wanted = StateConvention("quaternion", "closed_positive", (0.0, 1.0), "mm", "deg")
    other = replace(episode, state=convert_states(episode.state, EULER, wanted))
    assert other.state.shape == (33, 8)
    paths = [
        joint_path(panda, e, droid.action_convention, state=convention)
        for e, convention in ((episode, EULER), (other, wanted))
    ]
    assert np.abs(panda.fk_path(paths[0].q) - panda.fk_path(paths[1].q)).max() < 5e-4
    np.testing.assert_allclose(paths[0].opening, paths[1].opening, atol=1e-6)
