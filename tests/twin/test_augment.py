"""Augmented trajectories, and the datasets of simulated rollouts made from them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from simforcing.data import SIM, Dataset, open_dataset
from simforcing.data.actions import to_poses
from simforcing.errors import SimForcingError
from simforcing.twin import playground
from simforcing.twin.augment import Workspace, jitter_start, passage, reach, splice
from simforcing.twin.augmented import augment
from simforcing.twin.pairs import pair
from simforcing.twin.robot import Robot
from simforcing.twin.rollouts import Limits, RolloutConfig, lowest_points, matrices

BOX = Workspace((0.2, -0.3, 0.05), (0.6, 0.3, 0.5))


def path(seed: int, frames: int) -> np.ndarray:
    """A smooth motion in the box."""
    rng = np.random.default_rng(seed)
    ends = np.concatenate([rng.uniform(BOX.lower, BOX.upper), rng.normal(0, 0.3, 3), [rng.integers(2)]])
    start = np.concatenate([rng.uniform(BOX.lower, BOX.upper), rng.normal(0, 0.3, 3), [1.0]])
    t = np.linspace(0, 1, frames)[:, None]
    return np.asarray(start + t * (ends - start))


def turns(rows: np.ndarray) -> np.ndarray:
    spin = Rotation.from_rotvec(rows[:, 3:6])
    return np.asarray((spin[1:] * spin[:-1].inv()).magnitude())


def test_a_jittered_start_fades_away() -> None:
    rows = path(0, 30)
    out = jitter_start(rows, np.random.default_rng(1), 0.05, 0.3)
    assert 0.005 < np.linalg.norm(out[0, :3] - rows[0, :3]) < 0.05 * np.sqrt(3) + 1e-9
    np.testing.assert_allclose(out[10:], rows[10:], atol=1e-12)
    assert turns(np.stack([rows[0], out[0]]))[0] > 0.01


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), step=st.floats(0.01, 0.1), turn=st.floats(0.05, 0.4))
def test_a_passage_joins_within_speed(seed: int, step: float, turn: float) -> None:
    start, end = path(seed, 2)
    whole = np.concatenate([start[None], passage(start, end, step, turn), end[None]])
    assert np.linalg.norm(np.diff(whole[:, :3], axis=0), axis=1).max() <= step * (1 + 1e-6)
    assert turns(whole).max() <= turn * (1 + 1e-6)


def test_splicing_keeps_the_segments() -> None:
    first, second = path(1, 12), path(2, 9)
    out = splice([first, second], 60, 0.05, 0.2)
    np.testing.assert_allclose(out[:12], first, atol=1e-12)
    between = len(passage(first[-1], second[0], 0.05, 0.2))
    np.testing.assert_allclose(out[12 + between : 21 + between, :3], second[:, :3], atol=1e-12)
    np.testing.assert_allclose(out[21 + between :, :3], np.repeat(second[-1:, :3], 39 - between, axis=0))
    assert splice([first, second], 15, 0.05, 0.2).shape == (15, 7)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_reaching_stays_in_the_workspace(seed: int) -> None:
    rows = reach(path(seed, 20), 40, np.random.default_rng(seed), BOX, 0.06, 0.25)
    assert rows.shape == (40, 7)
    assert BOX.contains(rows)
    assert np.linalg.norm(np.diff(rows[:, :3], axis=0), axis=1).max() <= 0.06 + 1e-9
    assert np.ptp(rows[:, :3], axis=0).max() > 0.05


@pytest.fixture(scope="module")
def panda(shared: Path) -> Robot:
    return Robot.load(shared / "robots/panda/panda.urdf")


@pytest.fixture(scope="module")
def pairs(shared: Path, panda: Robot, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of the first 24 frames of three real episodes."""
    real = open_dataset(shared / "data/lerobot_v30")
    short = [
        replace(e, state=e.state[:24], action=e.action[:24], timestamps=e.timestamps[:24], task=f"task {e.index}")
        for e in real
    ]
    data = Dataset(
        real.root,
        fps=real.fps,
        robot=real.robot,
        cameras=real.cameras,
        action_convention=real.action_convention,
        meta=real.meta,
        lengths=[24] * 3,
        tasks=[e.task for e in short],
        state_names=real.state_names,
        action_names=real.action_names,
        load=lambda i: short[i],
        state_convention=real.state_convention,
    )
    out = tmp_path_factory.mktemp("augment") / "pairs"
    pair(data, out, panda, qa_episodes=0)
    return out


@pytest.fixture(scope="module")
def rollouts(pairs: Path, panda: Robot) -> Path:
    made = augment(pairs, pairs.parent / "rollouts", per_episode=2, seed=3, robot=panda)
    assert made.episodes + made.given_up == 6
    assert made.given_up == 0
    return made.out


def test_rollouts_are_a_dataset_for_the_teacher(pairs: Path, rollouts: Path) -> None:
    data, source = open_dataset(rollouts), open_dataset(pairs)
    assert data.cameras == (SIM,)
    assert data.lengths == (24,) * 6
    assert (data.state_names, data.action_names) == (source.state_names, source.action_names)
    assert data.action_convention == source.action_convention
    made = data.meta["augmentation"]["rollouts"]
    assert {row["kind"] for row in made} == {"changed", "spliced", "reaching"}
    for row, task in zip(made, data.tasks, strict=True):
        assert task == (f"task {row['source']}" if row["kind"] == "changed" else "move the arm")
    sim = data[0].frames(SIM)
    assert sim.shape == (24, 192, 320, 3)
    same_background = source[0].frames(SIM, [0])[0, 2, 300].astype(int)
    assert np.abs(sim[0, 2, 300] - same_background).max() < 6


def test_rollouts_keep_to_what_the_arm_can_do(pairs: Path, rollouts: Path, panda: Robot) -> None:
    data = open_dataset(rollouts)
    limits = Limits(**{key: tuple(v) if isinstance(v, list) else v for key, v in _limits(data).items()})
    convention = data.state_convention
    assert convention is not None
    recorded = np.concatenate([episode.state for episode in open_dataset(pairs)])
    np.testing.assert_allclose(limits.lower, recorded[:, :3].min(axis=0) - 0.05, atol=1e-6)
    for episode in data:
        poses = to_poses(episode.state, convention)
        answer = panda.ik(poses)
        assert answer.position_error.max() < 1e-3
        assert limits.workspace.contains(np.pad(poses[:, :3, 3], ((0, 0), (0, 4))), slack=0.02)
        low = lowest_points(panda, answer.q, 1.0 - episode.state[:, 6].astype(float))
        assert low.min() > limits.table - 0.01
        assert np.linalg.norm(np.diff(episode.state[:, :3], axis=0), axis=1).max() < 1.1 * limits.step


def test_actions_lead_as_far_as_the_recorded_ones(pairs: Path, rollouts: Path) -> None:
    data, source = open_dataset(rollouts), open_dataset(pairs)
    lead = _limits(data)["lead"]
    assert 0.5 < lead < 3.0  # recorded: the arm comes to its target a little more than a frame later

    def miss(dataset: Dataset, frames: float) -> float:
        gaps = []
        for episode in dataset:
            at = np.arange(20) + frames
            there = [np.interp(at, np.arange(24), episode.state[:, k]) for k in range(3)]
            gaps.append(np.linalg.norm(np.stack(there, axis=1) - episode.action[:20, :3], axis=1).mean())
        return float(np.mean(gaps))

    assert miss(data, lead) < 2e-3
    assert miss(source, lead) < min(miss(source, 0.0), miss(source, lead + 1.5))


def _limits(data: Dataset) -> dict[str, float]:
    found: dict[str, float] = data.meta["augmentation"]["limits"]
    return found


def test_coverage_is_shown(rollouts: Path) -> None:
    numbers = json.loads((rollouts / "qa/coverage.json").read_text())
    assert numbers["places"]["after"] > numbers["places"]["before"]
    for axis in "xyz":
        found = numbers[f"state.{axis}"]
        assert found["after"]["filled"] >= found["before"]["filled"]
        assert found["after"]["min"] <= found["before"]["min"]
    assert set(numbers) == {f"{w}.{n}" for w in ("state", "action") for n in open_dataset(rollouts).state_names} | {
        "places"
    }
    for name in ("coverage_state.png", "coverage_action.png", "rollouts.png"):
        assert (rollouts / "qa" / name).stat().st_size > 5000
    assert "Kept to: x, y, z in" in (rollouts / "qa/index.html").read_text()


def test_the_seed_decides(pairs: Path, rollouts: Path, panda: Robot) -> None:
    folder, whole = pairs.parent, open_dataset(rollouts)
    same = augment(pairs, folder / "same", per_episode=1, seed=3, robot=panda, episodes=[1]).out
    np.testing.assert_array_equal(open_dataset(same)[0].state, whole[2].state)  # the first rollout of episode 1
    np.testing.assert_array_equal(open_dataset(same)[0].action, whole[2].action)
    other = augment(pairs, folder / "other", per_episode=1, seed=4, robot=panda, episodes=[1]).out
    assert not np.array_equal(open_dataset(other)[0].state, whole[2].state)


def test_pairs_of_the_bundled_world_are_drawn_in_its_own_way(tmp_path: Path) -> None:
    world = playground.WorldConfig(size=64, length=16)
    playground.write_pairs(tmp_path / "pairs", [0, 1], world, workers=1)
    made = augment(tmp_path / "pairs", tmp_path / "out", per_episode=1)
    data = open_dataset(made.out)
    assert data.lengths == (16, 16)
    convention = data.state_convention
    assert convention is not None
    poses = to_poses(data[0].state, convention)
    turn = Rotation.from_matrix(poses[:, :3, :3]).as_rotvec()
    drawn = playground.simulate(np.column_stack([poses[:, :3, 3], turn, data[0].state[:, 6]]).astype(float), world)
    assert np.abs(drawn.astype(int) - data[0].frames(SIM)).mean() < 4.0
    assert np.abs(open_dataset(tmp_path / "pairs")[0].frames(SIM, [0])[0, 0, 0] - drawn[0, 0, 0].astype(int)).max() < 6


def test_what_cannot_be_augmented_says_why(
    pairs: Path, rollouts: Path, panda: Robot, shared: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(SimForcingError, match="exists already"):
        augment(pairs, rollouts, per_episode=1, robot=panda)
    with pytest.raises(SimForcingError, match="give at least 1 rollout"):
        augment(pairs, out, per_episode=0, robot=panda)
    with pytest.raises(SimForcingError, match="does not say robot and camera"):
        augment(shared / "data/lerobot_v30", out, per_episode=1, robot=panda)
    with pytest.raises(SimForcingError, match="made with 'panda', and bundled panda is another model"):
        augment(pairs, out, per_episode=1)  # its file's name alone does not make it the bundled one
    with pytest.raises(SimForcingError, match="lies inside"):
        augment(pairs, pairs / "out", per_episode=1, robot=panda)
    with pytest.raises(SimForcingError, match="made with 'panda', and bundled panda is another model"):
        augment(pairs, out, per_episode=1, robot=replace_name(Robot.load("panda"), "other"))
    with pytest.raises(SimForcingError, match="made with the frame 'panda_link8', not 'panda_hand'"):
        augment(pairs, out, per_episode=1, robot=Robot.load(panda.source, ee="panda_hand"))
    with pytest.raises(SimForcingError, match=r"episodes \[7\] are not all there"):
        augment(pairs, out, per_episode=1, robot=panda, episodes=[7])
    with pytest.raises(SimForcingError, match="shares must not be negative"):
        RolloutConfig(spliced=0.7, reaching=0.6)
    assert not out.exists()


def replace_name(robot: Robot, name: str) -> Robot:
    robot.name = name
    return robot


def test_lowest_point_follows_the_hand(panda: Robot) -> None:
    target = panda.fk(panda.home)
    lowered = np.stack([target, target])
    lowered[1, 2, 3] -= 0.1
    q = panda.ik(lowered).q
    low = lowest_points(panda, q, np.ones(2))
    assert low[1] < low[0] - 0.05
    np.testing.assert_allclose(matrices(np.array([[1.0, 2, 3, 0, 0, 0, 1]]))[0, :3, 3], [1, 2, 3])


@pytest.mark.slow
def test_workers_do_not_change_the_rollouts(pairs: Path, rollouts: Path, panda: Robot) -> None:
    again = augment(pairs, pairs.parent / "workers", per_episode=2, seed=3, robot=panda, workers=2).out
    for file in rollouts.rglob("*"):
        if file.is_file():
            assert (again / file.relative_to(rollouts)).read_bytes() == file.read_bytes()
