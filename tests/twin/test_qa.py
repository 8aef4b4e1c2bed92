"""Pairs that cannot be right are found, and right ones are not: in the bundled world, and on real episodes unseen by a
calibrated camera.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simforcing.data import open_dataset
from simforcing.twin import playground, qa
from simforcing.twin.camera import default_camera
from simforcing.twin.render import ArmRenderer
from simforcing.twin.replay import joint_path, state_convention
from simforcing.twin.robot import Robot


@pytest.fixture(scope="module")
def world() -> list[playground.Rollout]:
    """Episodes of the bundled world, whose camera is known."""
    return [playground.episode(seed) for seed in (100, 101, 103)]


@pytest.fixture(scope="module")
def franka(shared: Path) -> list[tuple[qa.Motion, qa.Motion, qa.Motion]]:
    """Real, simulated and arm motion of the real episodes, simulated by a guessed camera."""
    robot = Robot.load(shared / "robots/panda/panda.urdf")
    camera = default_camera(robot, 320, 192)
    data = open_dataset(shared / "data/lerobot_v30")
    convention = replace(data.action_convention, gripper="closed_positive")
    out = []
    with ArmRenderer(robot, camera, 192, 320) as renderer:
        for episode in data:
            path = joint_path(robot, episode, convention, state=state_convention(data, convention))
            sim = np.stack([renderer.picture(q, o) for q, o in zip(path.q, path.opening, strict=True)])
            real = episode.frames("observation.images.exterior_2")
            out.append((qa.seen(real), qa.seen(sim), qa.computed(qa.arm_points(robot, path))))
    return out


def cut(motion: qa.Motion, first: int, last: int) -> qa.Motion:
    """Frames first..last-1 of a motion."""
    where = None if motion.where is None else motion.where[first : last - 1]
    return qa.Motion(motion.energy[first : last - 1], motion.unlikeness[first:last, first:last], motion.stride, where)


def flags(real: qa.Motion, sim: qa.Motion, arm: qa.Motion | None = None, *, calibrated: bool = False) -> Sequence[str]:
    return qa.examine(real, sim, arm, calibrated=calibrated).flags


@pytest.mark.parametrize("calibrated", [True, False])
def test_right_pairs_pass_and_wrong_ones_are_named(world: list[playground.Rollout], calibrated: bool) -> None:
    motions = [(qa.seen(rollout.real), qa.seen(rollout.sim)) for rollout in world if rollout.real is not None]
    assert len(motions) == 3
    for real, sim in motions:
        check = qa.examine(real, sim, calibrated=calibrated)
        assert check.flags == ()
        assert check.agreement > 0.7
        assert 0.0 < check.lag_sim_real < 0.7  # the 'real' arm follows late, by a fraction of a frame
        assert (check.motion_overlap or 0.0) > 0.8 if calibrated else check.motion_overlap is None
        assert flags(real, sim.backwards(), calibrated=calibrated) == ("reversed",)
        assert flags(real, sim.mirrored(), calibrated=calibrated) == ("mirrored",)
        for shift in (2, 4):
            late = qa.examine(cut(real, 0, 33 - shift), cut(sim, shift, 33), calibrated=calibrated)
            assert late.flags == ("shifted",)
            assert late.lag_sim_real == pytest.approx(shift + check.lag_sim_real, abs=0.5)
            early = qa.examine(cut(real, shift, 33), cut(sim, 0, 33 - shift), calibrated=calibrated)
            assert early.flags == ("shifted",)
            assert early.lag_sim_real == pytest.approx(check.lag_sim_real - shift, abs=0.5)
    swapped = [flags(motions[i][0], motions[(i + 1) % 3][1], calibrated=calibrated) for i in range(3)]
    assert all(swapped), swapped


def test_a_misplaced_camera_is_named_where_it_should_fit(world: list[playground.Rollout]) -> None:
    rollout = world[0]
    assert rollout.real is not None
    real, sim = qa.seen(rollout.real), qa.seen(np.roll(rollout.sim, (50, 30), axis=(1, 2)))
    assert flags(real, sim, calibrated=True) == ("misplaced",)
    assert flags(real, sim, calibrated=False) == ()
    aligned = qa.seen(rollout.sim)
    assert qa.overlap(real, aligned) > 0.8 > 0.4 > qa.overlap(real, sim)
    assert qa.overlap(real, real) == 1.0
    assert qa.alike_in_place(real, aligned) > 0.4 > 0.1 > qa.alike_in_place(real, sim)


def test_real_pairs_pass_without_calibration(franka: list[tuple[qa.Motion, qa.Motion, qa.Motion]]) -> None:
    for real, sim, arm in franka:
        check = qa.examine(real, sim, arm, calibrated=False)
        assert check.flags == ()
        assert check.agreement > 0.5
        assert abs(check.lag_sim_real) <= 1.0


def test_wrong_real_pairs_are_named_without_calibration(franka: list[tuple[qa.Motion, qa.Motion, qa.Motion]]) -> None:
    for real, sim, arm in franka:
        assert flags(real, sim.backwards(), arm.backwards()) == ("reversed",)
    for shift in (3, 5):
        for real, sim, arm in franka[1:]:
            n = len(real.unlikeness)
            first, second = (0, n - shift), (shift, n)
            assert flags(cut(real, *first), cut(sim, *second), cut(arm, *second)) == ("shifted",)
            assert flags(cut(real, *second), cut(sim, *first), cut(arm, *first)) == ("shifted",)
    (real, _, _), (_, sim, arm) = franka[1], franka[2]
    assert flags(real, cut(sim, 0, 72), cut(arm, 0, 72))


def test_too_little_motion_is_not_judged(franka: list[tuple[qa.Motion, qa.Motion, qa.Motion]]) -> None:
    real, sim, arm = franka[0]
    assert flags(cut(real, 0, 8), cut(sim, 0, 8), cut(arm, 0, 8)) == ("still",)
    parked = qa.computed(np.zeros((33, 4, 3)))
    assert flags(real, sim, parked) == ("still",)


def test_commanded_motion_that_leads_by_two_frames_is_measured(
    franka: list[tuple[qa.Motion, qa.Motion, qa.Motion]],
) -> None:
    real, sim, arm = franka[2]
    check = qa.examine(
        cut(real, 0, 87), cut(sim, 0, 87), cut(arm, 0, 87), action_energy=arm.energy[2:88], calibrated=False
    )
    assert check.lag_action_sim == pytest.approx(2.0, abs=0.1)
    stored = check.to_dict()
    assert stored["lag_action_real"] == pytest.approx(stored["lag_action_sim"] + stored["lag_sim_real"], abs=0.02)


def test_agreement_is_a_correlation_that_time_alone_does_not_raise() -> None:
    rng = np.random.default_rng(0)
    walks = [np.cumsum(rng.normal(0, 0.02, (80, 5, 3)), axis=0) for _ in range(12)]  # any walk drifts away in time
    motions = [qa.computed(walk) for walk in walks]
    assert qa.agreement(motions[0], motions[0]) == pytest.approx(1.0)
    others = [qa.agreement(motions[0], other) for other in motions[1:]]
    assert abs(np.mean(others)) < 0.2
    assert max(others) < 0.6


def test_long_episodes_are_thinned(franka: list[tuple[qa.Motion, qa.Motion, qa.Motion]]) -> None:
    rng = np.random.default_rng(0)
    walk = np.cumsum(rng.normal(0, 0.01, (600, 4, 3)), axis=0)
    motion = qa.computed(walk)
    assert (motion.stride, motion.unlikeness.shape, motion.energy.shape) == (3, (200, 200), (599,))
    assert qa.agreement(motion, motion) == pytest.approx(1.0)


def test_best_lag_finds_fractions() -> None:
    lag, score = qa.best_lag(lambda k: 1.0 - (k - 1.3) ** 2, 5)
    assert lag == pytest.approx(1.3)
    assert score == pytest.approx(1.0 - 0.09)
