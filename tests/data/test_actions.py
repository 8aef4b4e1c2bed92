"""Conversions of actions and states: against SciPy and by hand, and round trips of random trajectories."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from simforcing.data import ActionConvention, StateConvention, actions
from simforcing.errors import SimForcingError

CONVENTIONS = st.builds(
    ActionConvention,
    kind=st.just("delta"),
    relative_to=st.sampled_from(["state", "target"]),
    frame=st.sampled_from(["base", "tool"]),
    rotation=st.sampled_from(["rotvec", "euler_xyz", "quaternion"]),
    gripper=st.sampled_from(["open_positive", "closed_positive"]),
    gripper_range=st.sampled_from([(0.0, 1.0), (-1.0, 1.0), (0.0, 0.08)]),
    position_unit=st.sampled_from(["m", "cm", "mm"]),
    angle_unit=st.sampled_from(["rad", "deg"]),
    position_scale=st.sampled_from([1.0, 0.05]),
    angle_scale=st.sampled_from([1.0, 0.5]),
) | st.builds(
    ActionConvention,
    rotation=st.sampled_from(["rotvec", "euler_xyz", "quaternion"]),
    gripper=st.sampled_from(["open_positive", "closed_positive"]),
    angle_unit=st.sampled_from(["rad", "deg"]),
)


def trajectory(seed: int, count: int = 12) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Measured poses, target poses near the next of them, openings."""
    random = np.random.default_rng(seed)
    poses = np.tile(np.eye(4), (2, count, 1, 1))
    turn = Rotation.random(random_state=random)
    for i in range(count):
        turn = Rotation.from_rotvec(random.normal(scale=0.2, size=3)) * turn
        poses[0, i, :3, :3] = turn.as_matrix()
        poses[1, i, :3, :3] = (Rotation.from_rotvec(random.normal(scale=0.05, size=3)) * turn).as_matrix()
    poses[0, :, :3, 3] = np.cumsum(random.normal(scale=0.02, size=(count, 3)), axis=0)
    poses[1, :, :3, 3] = poses[0, :, :3, 3] + random.normal(scale=0.01, size=(count, 3))
    return poses[0], poses[1], random.uniform(size=count)


@given(st.integers(0, 10**6), CONVENTIONS, CONVENTIONS)
def test_any_convention_to_any_other_and_back(seed, first, second):
    measured, reached, opening = trajectory(seed)
    rows = actions.from_poses(actions.changes(reached, measured, first), opening, first)
    other = actions.convert_actions(rows, measured, first, second)
    back = actions.convert_actions(other, measured, second, first)
    np.testing.assert_allclose(actions.targets(other, measured, second), reached, atol=2e-5)
    np.testing.assert_allclose(actions.targets(back, measured, first), reached, atol=4e-5)
    np.testing.assert_allclose(actions.to_openings(back[:, -1], first), opening, atol=1e-5)


@given(st.integers(0, 10**6), CONVENTIONS)
def test_states_and_back(seed, convention):
    poses, _, opening = trajectory(seed)
    keys = ("rotation", "gripper", "gripper_range", "position_unit", "angle_unit")
    kept = StateConvention(**{key: getattr(convention, key) for key in keys})
    rows = actions.from_poses(poses, opening, kept)
    plain = actions.convert_states(rows, kept, StateConvention())
    np.testing.assert_allclose(actions.to_poses(plain, StateConvention()), poses, atol=2e-5)
    np.testing.assert_allclose(plain[:, -1], opening, atol=1e-5)


@given(st.integers(0, 10**6), st.sampled_from(["rotvec", "euler_xyz", "quaternion"]), st.booleans())
def test_states_with_fingers_and_a_base_and_back(seed, rotation, fingers):
    poses, _, opening = trajectory(seed)
    base = (-0.66, 0.1, 0.912, 0.2, -0.3, 1.5)
    stored = StateConvention(rotation, gripper_range=(0.0, 0.08), fingers=fingers, base=base)
    assert StateConvention.from_dict(stored.to_dict()) == stored
    rows = actions.from_poses(poses, opening, stored)
    assert rows.shape[1] == actions.width(stored) == len(actions.names(stored))
    plain = actions.convert_states(rows, stored, StateConvention())
    np.testing.assert_allclose(actions.to_poses(plain, StateConvention()), poses, atol=2e-5)
    np.testing.assert_allclose(plain[:, -1], opening, atol=1e-5)


def test_states_of_libero_by_hand():
    """A base at (-0.6, 0, 0), fingers 3 cm from the middle each."""
    stored = StateConvention(gripper_range=(0.0, 0.08), fingers=True, base=(-0.6, 0, 0, 0, 0, np.pi / 2))
    row = np.array([[0.1, 0.2, 0.3, 0, 0, np.pi / 2, 0.03, -0.03]], np.float32)
    plain = actions.convert_states(row, stored, StateConvention())
    np.testing.assert_allclose(plain, [[0.2, -0.7, 0.3, 0, 0, 0, 0.75]], atol=1e-6)
    with pytest.raises(SimForcingError, match="finger_1, finger_2 are 8 numbers"):
        actions.to_poses(row[:, :7], stored)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"fingers": 2}, "fingers is 2"),
        ({"fingers": True, "gripper": "closed_positive"}, "open where they are apart"),
        ({"fingers": True}, "fingers need gripper_range"),
        ({"base": [0, 0]}, "base is"),
        ({"base": "123456"}, "give six numbers"),
        ({"base": [True, 0, 0, 0, 0, 0]}, "give six numbers"),
        ({"base": [0, 0, "z", 0, 0, 0]}, "give six numbers"),
        ({"base": [0, 0, float("nan"), 0, 0, 0]}, "base is"),
    ],
)
def test_conventions_that_make_no_sense(wrong, says):
    with pytest.raises(SimForcingError, match=says):
        StateConvention.from_dict(wrong)


def test_deltas_by_hand():
    quarter = Rotation.from_euler("z", 90, degrees=True)
    measured = np.tile(np.eye(4), (2, 1, 1))
    measured[:, :3, :3] = quarter.as_matrix()
    row = np.array([[0.1, 0, 0, 0, 0, np.pi / 2, 1.0]] * 2, np.float32)
    base = ActionConvention("delta", "state", "base")
    np.testing.assert_allclose(actions.targets(row, measured, base)[0, :3, 3], [0.1, 0, 0], atol=1e-7)
    tool = replace(base, frame="tool")  # the tool's x axis points along the base's y
    np.testing.assert_allclose(actions.targets(row, measured, tool)[0, :3, 3], [0, 0.1, 0], atol=1e-7)
    chained = actions.targets(row, measured, replace(base, relative_to="target"))
    np.testing.assert_allclose(chained[:, 0, 3], [0.1, 0.2], atol=1e-7)
    turned = Rotation.from_matrix(chained[1, :3, :3]).as_euler("xyz")
    np.testing.assert_allclose(turned, [0, 0, -np.pi / 2], atol=1e-6)  # 90 + 90 + 90 degrees


def test_units_and_gripper_by_hand():
    source = ActionConvention(
        rotation="euler_xyz", gripper="closed_positive", gripper_range=(-1, 1), position_unit="cm", angle_unit="deg"
    )
    row = np.array([[10, 20, 30, 90, 0, 0, 1.0]], np.float32)
    made = actions.convert_actions(row, np.eye(4)[None], source, ActionConvention())
    np.testing.assert_allclose(made, [[0.1, 0.2, 0.3, np.pi / 2, 0, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(
        actions.convert_actions(row, np.eye(4)[None], source, ActionConvention(rotation="quaternion")),
        [[0.1, 0.2, 0.3, np.sqrt(0.5), 0, 0, np.sqrt(0.5), 0]],
        atol=1e-6,
    )


@given(st.integers(0, 10**6), st.sampled_from(["rotvec", "euler_xyz", "quaternion"]))
def test_unwrapped_rotations_are_the_same_and_do_not_jump(seed, rotation):
    random = np.random.default_rng(seed)
    turn, rows = Rotation.from_euler("xyz", [np.pi, 0.1, 0.2]), []
    for _ in range(40):
        turn = Rotation.from_rotvec(random.normal(scale=0.08, size=3)) * turn
        rows.append(turn)
    every = Rotation.concatenate(rows)
    stored = {"rotvec": every.as_rotvec, "quaternion": every.as_quat}.get(rotation, lambda: every.as_euler("xyz"))()
    smooth = actions.unwrap(stored, rotation)
    jumps = np.abs(np.diff(smooth, axis=0)).max()
    assert jumps < (np.pi if rotation == "euler_xyz" else 1.5)
    make = {"rotvec": Rotation.from_rotvec, "quaternion": Rotation.from_quat}
    again = make.get(rotation, lambda values: Rotation.from_euler("xyz", values))(smooth)
    assert (every.inv() * again).magnitude().max() < 1e-6


def test_euler_episodes_agree_on_the_turn():
    rolls = [np.array([3.1, -3.1, 3.0]), np.array([-3.1, -3.0, 3.1])]
    parts = [np.stack([roll, np.zeros(3), np.zeros(3)], axis=1) for roll in rolls]
    near = actions.circular_mean(parts)
    made = np.concatenate([actions.unwrap(part, "euler_xyz", near)[:, 0] for part in parts])
    assert np.ptp(made) < 0.5 and np.allclose(np.cos(made), np.cos(np.concatenate(rolls)))


def test_integrated_deltas_reach_the_targets():
    measured, reached, opening = trajectory(3)
    for frame in ("base", "tool"):
        convention = ActionConvention("delta", "target", frame)
        rows = actions.from_poses(actions.changes(reached, measured, convention), opening, convention)
        poses, opened = actions.integrate(rows, convention)
        moved = actions.targets(rows, np.tile(np.eye(4), (len(rows), 1, 1)), convention)
        np.testing.assert_allclose(poses[1:], moved[:-1], atol=1e-5)
        np.testing.assert_allclose(opened[1:], opening[:-1], atol=1e-5)


def test_resampled_rows_lead_to_each_other():
    kept, leading = actions.resample(11, 3)
    assert kept.tolist() == [0, 3, 6, 9] and leading.tolist() == [2, 5, 8, 10]
    assert [array.tolist() for array in actions.resample(3, 1)] == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: actions.to_poses(np.zeros((2, 6)), ActionConvention()), r"shape \[2, 6\]; x, y, z, rx.* are 7"),
        (lambda: actions.to_poses(np.zeros((1, 8)), ActionConvention(rotation="quaternion")), "a quaternion is zero"),
        (lambda: actions.integrate(np.zeros((1, 7)), ActionConvention()), "only deltas"),
        (
            lambda: actions.targets(np.zeros((2, 7)), np.eye(4)[None], ActionConvention("delta", "state")),
            "2 actions but 1 states",
        ),
        (
            lambda: actions.targets(np.zeros((1, 7)), np.eye(4)[None], ActionConvention(frame="tool")),
            "absolute poses need frame = base",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(SimForcingError, match=message):
        call()
