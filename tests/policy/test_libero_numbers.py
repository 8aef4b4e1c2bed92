"""LIBERO's numbers: orientation, states, actions for the environment, windows of recorded actions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from simforcing.data.stats import Normalizer
from simforcing.errors import InputError
from simforcing.policy.libero_numbers import (
    GRIPPER,
    STAY_OPEN,
    axis_angle,
    from_recording,
    proprioception,
)

NUMBER = st.floats(-1, 1).filter(lambda x: abs(x) > 1e-3)


@settings(max_examples=30, deadline=None)
@given(st.lists(NUMBER, min_size=4, max_size=4))
def test_orientation(values: list[float]) -> None:
    """The rotation is the quaternion's, and the angle goes on beyond pi where w is negative."""
    q = np.array(values) / np.linalg.norm(values)
    found = axis_angle(q)
    np.testing.assert_allclose(Rotation.from_rotvec(found).as_matrix(), Rotation.from_quat(q).as_matrix(), atol=1e-7)
    angle = np.linalg.norm(found)
    assert 0 <= angle <= 2 * np.pi + 1e-9
    assert (angle > np.pi) == (q[3] < 0)
    np.testing.assert_allclose(np.linalg.norm(axis_angle(-q)), 2 * np.pi - angle, atol=1e-6)


def test_orientation_at_the_ends() -> None:
    found = axis_angle(np.array([[0, 0, 0, 1.0], [1e-9, 0, 0, 1.0], [0, 0, 0, 1.5], [1, 0, 0, 0], [0, 0, 0, -1]]))
    np.testing.assert_allclose(found, [[0, 0, 0], [0, 0, 0], [0, 0, 0], [np.pi, 0, 0], [0, 0, 0]])


def test_state() -> None:
    quaternion = np.array([0, 0, np.sin(0.25), np.cos(0.25)])
    state = proprioception(np.array([0.1, -0.2, 1.0]), quaternion, np.array([0.04, -0.04]))
    np.testing.assert_allclose(state, [0.1, -0.2, 1.0, 0, 0, 0.5, 0.04, -0.04], atol=1e-7)
    assert state.dtype == np.float32
    with pytest.raises(InputError, match="NaN or infinite"):
        proprioception(np.array([np.nan, 0, 0]), quaternion, np.zeros(2))
    with pytest.raises(InputError, match="quaternion has shape"):
        proprioception(np.zeros(3), np.zeros(3), np.zeros(2))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=7, max_size=7))
def test_actions_for_the_environment(values: list[float]) -> None:
    """Open (1 in the recordings, +1 normalised) becomes -1; the other numbers are the recordings', unclipped."""
    low, high = np.array([-2, -1, -1, 0.5, -1, -1, 0], np.float32), np.array([1, 2, 1, 0.5, 1, 1, 1], np.float32)
    y = np.array([values], np.float32)
    stats = Normalizer(low, high)
    found = from_recording(stats.denormalize(y))
    np.testing.assert_allclose(found[0, :3], ((y[0] + 1) / 2 * (high - low) + low)[:3], atol=1e-5)
    assert found[0, 3] == pytest.approx(y[0, 3] + 0.5, abs=1e-6)
    free = from_recording(stats.denormalize(y), binarise=False)
    assert free[0, GRIPPER] == pytest.approx(-y[0, GRIPPER], abs=1e-6)
    assert found[0, GRIPPER] == np.sign(free[0, GRIPPER])
    if abs(y[0, GRIPPER]) > 1e-3:
        assert found[0, GRIPPER] == -np.sign(y[0, GRIPPER])
    assert STAY_OPEN[GRIPPER] == from_recording(np.ones((1, 7), np.float32))[0, GRIPPER]
