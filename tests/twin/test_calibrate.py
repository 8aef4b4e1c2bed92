"""Finding a camera from motion: silhouettes, evidence, fit, files, errors."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.spatial.transform import Rotation

from simforcing.cli.main import main
from simforcing.data import REAL, LeRobotWriter
from simforcing.errors import SimForcingError
from simforcing.twin.camera import Camera
from simforcing.twin.camera_fit import QUICK, Effort, Track, fit_camera
from simforcing.twin.evidence import Change, Evidence, agreement, reduced
from simforcing.twin.playground import WorldConfig, episode, matrices
from simforcing.twin.robot import Robot
from simforcing.twin.scene import setting
from simforcing.twin.silhouette import ArmSurface, ExactMasks, displaced, splat

SIZE = 64
FIXED = {"camera_shift": 0.0, "camera_turn": 0.0}  # one camera for all episodes, which is what a joint fit finds
TINY = Effort(
    starts=600, tries=8, descents=3, finalists=1, scan_width=32, coarse_width=48, middle_width=64,
    scan_frames=8, coarse_frames=10, middle_frames=12, frames=12,
    try_generations=10, coarse_generations=16, middle_generations=10, exact_generations=4,
)  # fmt: skip
HARDLY = replace(TINY, starts=40, tries=2, descents=1, coarse_generations=2, middle_generations=2, exact_generations=1)


def true_camera(robot: str, size: int) -> Camera:
    chosen = setting(robot)
    return Camera.look_at(chosen.camera, chosen.look_at, fovy=chosen.fovy, height=size, width=size)


def tracks(robot: Robot, seeds: range, **config: float) -> list[Track]:
    out = []
    for seed in seeds:
        made = episode(seed, WorldConfig(robot=robot.name, **config))
        assert made.real is not None
        state = made.state.astype(np.float64)
        out.append(Track(f"episode {seed}", robot.ik(matrices(state)).q, state[:, 6], made.real))
    return out


def apart(found: Camera, true: Camera) -> tuple[float, float, float]:
    """Centimetres, degrees, per cent of focal length."""
    turn = Rotation.from_matrix(found.pose[:3, :3].T @ true.pose[:3, :3]).magnitude()
    focal = np.tan(np.radians(true.fovy) / 2) / np.tan(np.radians(found.fovy) / 2) - 1
    return 100 * float(np.linalg.norm(found.pose[:3, 3] - true.pose[:3, 3])), float(np.degrees(turn)), 100 * abs(focal)


@pytest.fixture(scope="module")
def arm() -> Robot:
    return Robot.load("widowx250s")


@pytest.mark.parametrize("near", [1.0, 0.45])
def test_points_and_renderer_agree_on_silhouettes(arm: Robot, near: float):
    chosen = setting("widowx250s")
    eye = np.array(chosen.look_at) + near * (np.array(chosen.camera) - chosen.look_at)
    camera = Camera.look_at(eye, chosen.look_at, fovy=chosen.fovy, height=96, width=96)
    q = np.stack([arm.home, arm.home + 0.3])
    with ExactMasks(arm, 96, 96) as exact:
        drawn = exact.draw(camera, q, np.ones(2))
        spacing = arm.length / 96
        points = ArmSurface(exact.renderer, spacing).at(q, np.ones(2))
    seen = splat(points, spacing, camera, 96, 96, np.array([[0, 1]]))
    assert (seen.masks & drawn).sum() / (seen.masks | drawn).sum() > 0.9
    assert (seen.shifted & ~seen.masks[:1]).mean() < 0.03
    assert (seen.shifted & seen.masks[:1]).sum() > 0.5 * seen.masks[0].sum()


def test_links_that_stand_still_are_left_out(arm: Robot):
    turned = np.stack([arm.home, arm.home])
    turned[1, -1] += 0.8  # the last joint alone
    with ExactMasks(arm, 48, 48) as exact:
        surface = ArmSurface(exact.renderer, 0.03)
        moving = surface.moving(turned, np.ones(2))
        assert 0 < len(moving) < len(surface.geoms) / 2
        everything = exact.draw(true_camera("widowx250s", 48), turned, np.ones(2)).sum()
        exact.show(moving)
        assert exact.draw(true_camera("widowx250s", 48), turned, np.ones(2)).sum() < everything / 2


def test_change_knows_shadows_and_exposure():
    before = np.random.default_rng(0).uniform(0.4, 0.9, (1, 16, 16, 3)).astype(np.float32)
    after = before.copy()
    after[0, :2] *= 0.6  # a shadow
    after[0, -2:] = [0.1, 0.9, 0.1]  # a thing
    change = Change.between(np.concatenate([before, after + 0.01]), np.array([[0, 1]]))
    assert change.shadow[0, :2].mean() > 0.8
    assert change.other[0, -2:].mean() > 0.8
    assert change.any[0, 6:10].max() == 0.0


def test_the_right_masks_have_the_best_score():
    frames = np.full((2, 32, 32, 3), 0.7, np.float32)
    masks = np.zeros((2, 32, 32), bool)
    masks[0, 4:12, 4:12] = masks[1, 18:26, 10:18] = True
    frames[masks] = [0.1, 0.2, 0.4]
    pairs, shifted = np.array([[0, 1]]), masks[:1]
    evidence = Evidence(frames, pairs)
    best = evidence.score(masks, shifted)
    assert best > 0 == evidence.score(np.zeros_like(masks), shifted)
    for wrong in (np.roll(masks, 2, axis=2), masks | np.roll(masks, 3, axis=1), masks[::-1, ::-1]):
        assert evidence.score(wrong, shifted) < best
    right, off = (agreement(evidence.change, m, pairs, 64) for m in (masks, np.roll(masks, 2, axis=2)))
    assert (right.overlap, right.distance) == (pytest.approx(1.0), 0.0)
    assert off.overlap < 0.7
    assert 0.5 < off.distance < 4.0  # two of 32 pixels are four of 64, most of the shifted area is still common


def test_displaced_masks_lose_what_leaves():
    mask = np.zeros((1, 4, 5), bool)
    mask[0, 0, 0] = mask[0, 2, 3] = True
    assert np.argwhere(displaced(mask, 1, 1)[0]).tolist() == [[1, 1], [3, 4]]
    assert np.argwhere(displaced(mask, -1, 0)[0]).tolist() == [[1, 3]]
    assert (displaced(mask, 0, 0) == mask).all()


@pytest.mark.slow
def test_a_camera_that_is_moved_between_episodes_is_noticed(arm: Robot):
    one = tracks(arm, range(1), size=SIZE, **FIXED)[0]
    moved = replace(one, frames=np.roll(one.frames, (0, 3), axis=(1, 2)))  # the same episode, three pixels to the right
    found = fit_camera(arm, [one, moved], effort=TINY, fovy=setting("widowx250s").fovy)
    assert found.wander == pytest.approx(1.5, abs=0.7)  # either from the middle between them


def test_reduced_frames_are_averages():
    frames = np.zeros((1, 4, 4, 3), np.uint8)
    frames[0, :2, :2] = 255
    assert reduced(frames, 2, 2)[0, :, :, 0].tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_finds_the_camera_of_the_bundled_world_roughly(arm: Robot):
    given = tracks(arm, range(2), size=SIZE, **FIXED)
    found = fit_camera(arm, given, effort=TINY, fovy=setting("widowx250s").fovy)
    centimetres, degrees, _ = apart(found.camera, true_camera("widowx250s", SIZE))
    assert centimetres < 3
    assert degrees < 2.5
    assert found.held_out.overlap > 2 * found.guess_held_out.overlap
    assert found.held_out.distance < found.guess_held_out.distance


def test_the_same_seed_finds_the_same_camera(arm: Robot):
    given = tracks(arm, range(1), size=SIZE, **FIXED)
    one, two, other = (fit_camera(arm, given, effort=HARDLY, seed=seed).camera for seed in (3, 3, 4))
    assert (one.pose == two.pose).all()
    assert one.fovy == two.fovy
    assert (one.pose != other.pose).any()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("robot", "first", "world"),
    [("widowx250s", 0, FIXED), ("widowx250s", 3, FIXED), ("panda", 3, FIXED), ("widowx250s", 0, {})],
)
def test_finds_the_camera_of_the_bundled_world_from_three_episodes(robot: str, first: int, world: dict[str, float]):
    seen = Robot.load(robot, ee="ee")
    found = fit_camera(seen, tracks(seen, range(first, first + 3), size=128, **world))
    assert (found.wander > 0) == (not world)  # the world's own camera stands a little differently in every episode
    centimetres, degrees, per_cent = apart(found.camera, true_camera(robot, 128))
    assert centimetres < 1.5
    assert degrees < 1.5
    assert per_cent < 3.0


def dataset(root: Path, picture: np.ndarray, state: np.ndarray) -> Path:
    names = ("x", "y", "z", "rx", "ry", "rz", "gripper")
    with LeRobotWriter(
        root, fps=5.0, robot="widowx250s", cameras={REAL: picture.shape[1:3]}, state_names=names, action_names=names,
        meta={},
    ) as writer:  # fmt: skip
        writer.add_episode({REAL: picture}, state, state, "move")
    return root


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = episode(0, WorldConfig(size=SIZE, **FIXED))
    assert made.real is not None
    return dataset(tmp_path_factory.mktemp("world") / "data", made.real, made.state)


def test_command_writes_camera_report_and_overlays(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("simforcing.twin.camera_fit.QUICK", HARDLY)
    out = tmp_path / "cameras" / "camera.json"
    words = ["twin", "calibrate", str(world), "--robot", "widowx250s", "--camera", "real", "-o", str(out)]
    assert main([*words, "--quick", "--fovy", "43", "--restarts", "2"]) == 0
    assert "default guess" in capsys.readouterr().out
    assert Camera.load(out).fovy == 43.0
    report = json.loads(out.with_suffix(".report.json").read_text())
    assert report["camera_key"] == REAL
    assert 0 <= report["cameras"][0]["held_out"]["overlap"] <= 1
    assert len(report["cameras"][0]["scores_of_searches"]) == 2
    assert report["cameras"][0]["score"] == max(report["cameras"][0]["scores_of_searches"])
    with Image.open(out.with_suffix(".overlays") / "episode_000000.png") as picture:
        assert picture.size == (6 * SIZE, 2 * SIZE)
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    assert sorted(p.name for p in out.parent.iterdir()) == ["camera.json", "camera.overlays", "camera.report.json"]


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--camera", "left"], "no camera 'left'; it has real"),
        (["--episodes", "7"], "no episode 7; it has 0 to 0"),
        (["--restarts", "0"], "0 searches: at least one is needed"),
        (["--tool-offset", "0.9", "0", "0", "0", "0", "0"], "misses the pose"),
    ],
)
def test_bad_input_is_one_line(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], says: str
):
    out = tmp_path / "camera.json"
    assert main(["twin", "calibrate", str(world), "--robot", "widowx250s", "-o", str(out), *extra]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert error.count("\n") == 0
    assert not list(tmp_path.iterdir())


def test_what_does_not_move_is_said(arm: Robot):
    track = tracks(arm, range(1), size=SIZE, **FIXED)[0]
    still = Track("episode 4", np.repeat(track.q[:1], 12, axis=0), np.ones(12), track.frames[:12])
    with pytest.raises(SimForcingError, match="episode 4: the arm stands still"):
        fit_camera(arm, [still], effort=QUICK)
    frozen = Track("episode 5", track.q[:12], np.ones(12), np.repeat(track.frames[:1], 12, axis=0))
    with pytest.raises(SimForcingError, match="episode 5: nothing moves in the pictures"):
        fit_camera(arm, [frozen], effort=QUICK)
    short = Track("episode 6", track.q[:3], np.ones(3), track.frames[:3])
    with pytest.raises(SimForcingError, match="episode 6: 3 frames"):
        fit_camera(arm, [short], effort=QUICK)
    other = Track("episode 7", track.q[:12], np.ones(12), np.zeros((12, 32, 64, 3), np.uint8))
    with pytest.raises(SimForcingError, match="episode 7: pictures of 32x64, others have 64x64"):
        fit_camera(arm, [track, other], effort=QUICK)
