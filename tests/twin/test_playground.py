"""The bundled world: determinism, reach, what is seen, what happens to things, augmentation, datasets."""

from functools import lru_cache
from pathlib import Path

import mujoco
import numpy as np
import pytest

from simforcing.data import REAL, SIM, open_dataset
from simforcing.errors import SimForcingError
from simforcing.twin import scene
from simforcing.twin.augment import (
    AugmentConfig,
    Workspace,
    about,
    augment_trajectory,
    continuous,
    limit_speed,
    mirror,
    resample,
)
from simforcing.twin.playground import (
    ROW_NAMES,
    WorldConfig,
    episode,
    matrices,
    simulate,
    write_pairs,
    write_simulation,
)
from simforcing.twin.scene import SETTINGS, Follower, real_view, setting, simulation_view
from simforcing.twin.script import Plan, draw_plan, path

SMALL = WorldConfig(size=64, length=9)
FULL = WorldConfig(size=64)


def scripted(seed: int, config: WorldConfig = FULL) -> tuple[Plan, np.ndarray]:
    """Plan and commanded poses of an episode, as `episode` makes them, without drawing."""
    rng = np.random.default_rng(np.random.SeedSequence(seed).spawn(3)[0])
    chosen = setting(config.robot)
    plan = draw_plan(rng, chosen, config.length)
    poses = path(plan.waypoints, config.length, float(rng.uniform(*config.speed)), chosen.tool)
    return plan, chosen.workspace.clamp(poses)


def seed_of(start: str, skip: int = 0) -> int:
    """First seed whose task begins with `start`."""
    return [s for s in range(40) if tasks()[s].startswith(start)][skip]


@lru_cache(maxsize=1)
def tasks() -> list[str]:
    """Tasks of the first seeds."""
    return [scripted(seed)[0].task for seed in range(40)]


def test_same_seed_same_bytes_whatever_came_before() -> None:
    first = episode(3, SMALL)
    episode(4, SMALL, augment=True)
    again, alone = episode(3, SMALL), episode(3, SMALL, real=False)
    assert first.real is not None and again.real is not None and alone.real is None
    for a, b in ((first.sim, again.sim), (first.real, again.real), (first.sim, alone.sim)):
        np.testing.assert_array_equal(a, b)
    for a, b in ((first.state, again.state), (first.targets, again.targets), (first.targets, alone.targets)):
        assert a.dtype == np.float32
        np.testing.assert_array_equal(a, b)
    assert first.task == alone.task
    assert not np.array_equal(first.targets, episode(5, SMALL, real=False).targets)


def test_targets_lead_frames_by_one_and_drive_the_simulation() -> None:
    rollout = episode(7, SMALL, real=False)
    _, poses = scripted(7, SMALL)
    np.testing.assert_allclose(rollout.targets[:-1], poses[1:], atol=1e-6)
    np.testing.assert_array_equal(rollout.targets[-1], rollout.targets[-2])
    frames = np.concatenate([poses[:1], rollout.targets[:-1].astype(np.float64)])
    redrawn = simulate(frames, SMALL)
    assert np.abs(redrawn.astype(int) - rollout.sim).mean() < 0.05, "targets do not reproduce the simulation"


@pytest.mark.parametrize("robot", SETTINGS)
def test_commanded_poses_are_reachable_and_continuous(robot: str) -> None:
    config = WorldConfig(size=64, robot=robot)
    chosen = setting(robot)
    follower = Follower(simulation_view(robot, 64).model, np.array(chosen.home))
    errors, steps = [], []
    for seed in range(12):
        poses = scripted(seed, config)[1]
        changed = augment_trajectory(poses, np.random.default_rng(seed), chosen.workspace)
        for rows in (poses, changed):
            joints, error = follower.follow(matrices(rows))
            errors.append(error)
            steps.append(np.linalg.norm(np.diff(rows[:, :3], axis=0), axis=1))
            reached = follower.fk(joints[-1])
            assert np.linalg.norm(reached[:3, 3] - rows[-1, :3]) == pytest.approx(error[-1], abs=1e-6)
    assert (np.concatenate(errors) < 0.005).mean() > 0.99
    motion = np.concatenate(steps)
    assert (motion < 0.01).mean() < 0.15, "too many idle frames"
    assert 0.025 < np.median(motion) < 0.06 and motion.max() < 0.08


def test_arm_and_gripper_are_in_every_frame() -> None:
    for seed in range(4):
        sim = episode(seed, FULL, real=False, augment=seed % 2 == 1).sim.astype(int)
        plain = sim[0, 0, 63]
        covered = (np.abs(sim - plain).max(axis=-1) > 25).mean(axis=(1, 2))
        assert covered.min() > 0.06 and covered.max() < 0.5, covered
        orange = ((sim[..., 0] > 130) & (sim[..., 0] - sim[..., 2] > 60)).sum(axis=(1, 2))
        assert orange.min() >= 3, f"seed {seed}: fingers out of sight in frame {int(orange.argmin())}"


def test_simulation_and_real_differ_but_move_together() -> None:
    overlaps, errors = [], []
    for seed in range(3):
        rollout = episode(seed, FULL)
        assert rollout.real is not None
        sim, real = rollout.sim.astype(int), rollout.real.astype(int)
        assert np.abs(sim - real).mean() > 20
        moved = [np.abs(np.diff(v, axis=0)).max(axis=-1) > 40 for v in (sim, real)]
        overlaps.append((moved[0] & moved[1]).sum() / moved[0].sum())
        errors.append(np.linalg.norm(rollout.state[1:, :3] - rollout.targets[:-1, :3], axis=1).mean())
    assert np.mean(overlaps) > 0.4
    assert 0.005 < np.mean(errors) < 0.025, "mean end-effector error outside 0.5 to 2.5 cm"


def test_agreement_is_a_knob() -> None:
    exact = WorldConfig(size=64, length=9, lag=0.0, gain_error=0.0, bias=0.0)
    loose = WorldConfig(size=64, length=9, lag=0.2, gain_error=0.1, bias=0.02)
    errors = []
    for config in (exact, SMALL, loose):
        rollout = episode(2, config)
        errors.append(np.linalg.norm(rollout.state[1:, :3] - rollout.targets[:-1, :3], axis=1).mean())
    assert errors[0] < errors[1] < errors[2]


def test_things_are_lifted_pushed_and_put_down() -> None:
    height, count = [], 0
    for skip in range(2):
        seed = seed_of("pick up", skip)
        task = episode(seed, FULL).task
        name = "ball" if task.endswith("ball") else "block0"
        height.append(float(real_view("widowx250s", 64, FULL.timestep).data.joint(name).qpos[2]))
    assert min(height) > 0.06, f"not lifted: {height}"
    for skip in range(2):
        seed = seed_of("push", skip)
        start = np.array(scripted(seed)[0].layout.places["block0"][:2])
        task = episode(seed, FULL).task
        end = real_view("widowx250s", 64, FULL.timestep).data.joint("block0").qpos[:2]
        way = {"left": (0, 1), "right": (0, -1), "forward": (1, 0)}[task.split()[-1]]
        count += int((end - start) @ np.array(way) > 0.03)
    assert count == 2
    seed = seed_of("put")
    episode(seed, FULL)
    view = real_view("widowx250s", 64, FULL.timestep)
    away = view.data.joint("block0").qpos[:2] - view.model.body("plate").pos[:2]
    assert np.linalg.norm(away) < scene.PLATE_RADIUS


def test_instructions_are_many_but_not_countless() -> None:
    plans = [scripted(seed)[0] for seed in range(250)]
    assert 12 <= len({plan.task for plan in plans}) <= 24
    for plan in plans:
        word = next((c for c in scene.COLOURS if c in plan.task), None)
        name = "ball" if plan.task.endswith("ball") else "block0"
        assert word is None or plan.layout.colours[name] == word
        assert word is None or name in plan.layout.places


@pytest.mark.parametrize("robot", SETTINGS)
def test_augmented_trajectories_stay_in_the_workspace_and_differ(robot: str) -> None:
    chosen, config = setting(robot), AugmentConfig()
    _, poses = scripted(1, WorldConfig(size=64, robot=robot))
    made = [augment_trajectory(poses, np.random.default_rng(k), chosen.workspace) for k in range(20)]
    for rows in made:
        assert rows.shape == poses.shape and chosen.workspace.contains(rows)
        assert rows[:, 6].min() >= 0.0 and rows[:, 6].max() <= 1.0
        assert np.linalg.norm(np.diff(rows[:, :3], axis=0), axis=1).max() <= config.max_step + 1e-9
        assert np.linalg.norm(rows[:, :3] - poses[:, :3], axis=1).mean() > 0.02
    assert np.std([rows[:, 1].mean() for rows in made]) > 0.02
    again = augment_trajectory(poses, np.random.default_rng(0), chosen.workspace)
    np.testing.assert_array_equal(made[0], again)


def test_augmentation_switched_off_changes_nothing() -> None:
    _, poses = scripted(2)
    still = AugmentConfig(
        mirror=0,
        reverse=0,
        speed=(1, 1),
        warp=0,
        offset=0,
        scale=(1, 1),
        turn=0,
        waypoints=0,
        noise=0,
        toggle=0,
    )
    out = augment_trajectory(poses, np.random.default_rng(0), setting("widowx250s").workspace, still)
    begin = int(np.argmin(np.linalg.norm(poses - out[0], axis=1)))  # a time offset remains
    assert np.linalg.norm(poses[begin : begin + 2, :3] - out[0, :3], axis=1).min() < 0.06
    np.testing.assert_allclose(resample(poses, np.arange(len(poses), dtype=float)), poses, atol=1e-9)
    np.testing.assert_allclose(limit_speed(poses, 1.0, 3.0), poses, atol=1e-9)
    np.testing.assert_allclose(mirror(mirror(poses)), poses)


def test_rotation_vectors_have_one_set_of_numbers() -> None:
    rows = np.zeros((2, 7))
    rows[:, 3:6] = [[np.pi - 0.1, 0, 0], [-(np.pi - 0.1), 0, 0]]  # 0.2 rad apart, on either side of pi
    np.testing.assert_allclose(continuous(rows)[1, 3], np.pi + 0.1)
    np.testing.assert_allclose(about(rows, np.array([-3.0, 0.0, 0.0]))[0, 3], -np.pi - 0.1)


def test_workspace_clamp_moves_only_what_is_outside() -> None:
    space = Workspace((0.1, -0.2, 0.0), (0.4, 0.2, 0.3), centre=(0, 0, 0.1), tool=0.0, reach=(0.1, 0.3))
    rows = np.zeros((3, 7))
    rows[:, :3] = [[0.2, 0.0, 0.1], [0.9, 0.0, 0.1], [0.4, 0.2, 0.3]]
    rows[:, 6] = [0.5, 1.5, -0.5]
    out = space.clamp(rows)
    np.testing.assert_allclose(out[0], rows[0])
    np.testing.assert_allclose(out[1, :3], [0.3, 0.0, 0.1])
    assert np.linalg.norm(out[2, :3] - [0, 0, 0.1]) == pytest.approx(0.3)
    np.testing.assert_allclose(out[:, 6], [0.5, 1.0, 0.0])
    assert space.contains(out) and not space.contains(rows)


def test_pairs_round_trip(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    out = write_pairs(tmp_path / "pairs", [11, 12, 13], SMALL, workers=2, progress=lambda *c: seen.append(c))
    data = open_dataset(out)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert (len(data), data.fps, data.robot, set(data.cameras)) == (3, 5, "widowx250s", {REAL, SIM})
    assert data.action_convention.kind == "absolute" and data.action_convention.hz == 5
    assert data.meta["world"]["seeds"] == [11, 12, 13] and data.meta["world"]["config"]["length"] == 9
    for index, seed in enumerate((11, 12, 13)):
        made, read = episode(seed, SMALL), data[index]
        assert read.task == made.task and read.length == 9
        np.testing.assert_array_equal(read.state, made.state)  # made in another process
        np.testing.assert_array_equal(read.action, made.targets)
        for key, frames in ((REAL, made.real), (SIM, made.sim)):
            assert frames is not None
            assert np.abs(read.frames(key).astype(int) - frames).mean() < 6.0
    assert tuple(data.state_names) == ROW_NAMES
    with pytest.raises(SimForcingError, match="already exists"):
        write_pairs(out, [1], SMALL, workers=1)


def test_simulation_dataset_has_one_camera(tmp_path: Path) -> None:
    out = write_simulation(tmp_path / "sim", [5, 6], SMALL, workers=1)
    data = open_dataset(out)
    assert data.cameras == (SIM,) and data.meta["world"]["augmented"] is True
    made = episode(6, SMALL, real=False, augment=True)
    np.testing.assert_array_equal(data[1].action, made.targets)
    np.testing.assert_array_equal(made.state[1:], made.targets[:-1])


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SimForcingError, match="seed"):
        write_pairs(tmp_path / "pairs", [1, -1], SMALL, workers=1)
    with pytest.raises(SimForcingError, match="no seeds"):
        write_pairs(tmp_path / "pairs", [], SMALL, workers=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "values",
    [
        {"size": 8}, {"size": 65}, {"length": 1}, {"fps": 0}, {"lag": -0.1}, {"gain_error": 2.0},
        {"bias": -1.0}, {"camera_shift": 1.0}, {"camera_turn": 9.0}, {"sensor_noise": -1.0},
        {"appearance": 1.5}, {"timestep": 0.1}, {"speed": (0.05, 0.01)}, {"robot": "gantry"},
    ],
)  # fmt: skip
def test_a_config_out_of_range_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(SimForcingError, match=f"{next(iter(values))}"):
        WorldConfig(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [{"mirror": 2.0}, {"speed": (0.0, 1.0)}, {"scale": (2.0, 1.0)}, {"noise": -1.0}, {"max_step": 0.0}],
)
def test_an_augmentation_out_of_range_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(SimForcingError, match=next(iter(values))):
        AugmentConfig(**values)  # type: ignore[arg-type]


def test_without_a_renderer_the_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise mujoco.FatalError("gladLoadGL error")

    view = simulation_view("widowx250s", 48)
    monkeypatch.setattr(mujoco, "MjrContext", fail)
    with pytest.raises(SimForcingError, match="libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6"):
        view.draw()
