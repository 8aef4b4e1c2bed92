"""Changed actions, where the video changes, and the arm's track, on scenes whose answers are known."""

from typing import Any

import numpy as np
import pytest

from simforcing.data.episode import ActionConvention
from simforcing.errors import SimForcingError
from simforcing.evaluate import behaviour as b

SIZE, FRAMES = 32, 6


def block(at: list[tuple[int, int]], colour: int = 220, ground: int = 60, size: int = 6) -> np.ndarray:
    """A clip in which a square stands at these corners, one a frame."""
    video = np.full((len(at), SIZE, SIZE, 3), ground, np.uint8)
    for frame, (y, x) in zip(video, at, strict=True):
        frame[max(0, y) : y + size, max(0, x) : x + size] = colour
    return video


def walk(dy: int = 0, dx: int = 4, start: tuple[int, int] = (10, 2)) -> list[tuple[int, int]]:
    return [(start[0] + dy * t, start[1] + dx * t) for t in range(FRAMES)]


TRUE = np.stack([block(walk()), block(walk(dx=0, dy=3, start=(2, 20)))])
SIM = np.stack([block(walk(), 40, 230), block(walk(dx=0, dy=3, start=(2, 20)), 40, 230)])


def test_masks_are_where_the_rendered_arm_is() -> None:
    masks = b.arm_masks(SIM)
    assert masks.sum((2, 3)).tolist() == [[36] * FRAMES] * 2
    assert masks[0, 1, 10:16, 6:12].all()
    moved = SIM.copy()
    moved[0, 3] = 0  # another picture altogether: no arm
    assert not b.arm_masks(moved)[0, 3].any()


def test_a_perfect_prediction_has_no_track_error() -> None:
    found = b.motion_accuracy(TRUE, TRUE, b.arm_masks(SIM))
    assert found.track.tolist() == [0, 0] and found.overlap.tolist() == [1, 1]


def test_a_shifted_arm_is_off_by_as_many_pixels() -> None:
    shifted = TRUE.copy()
    shifted[0] = block([(y + (1 if t else 0), x) for t, (y, x) in enumerate(walk())])
    found = b.motion_accuracy(shifted, TRUE, b.arm_masks(SIM))
    assert found.track[0] == pytest.approx(1.0)
    assert found.overlap[0] == pytest.approx(30 / 42)


def test_an_arm_that_stands_still_is_off_by_its_motion_and_one_that_vanishes_too() -> None:
    still, gone = np.repeat(TRUE[:, :1], FRAMES, 1), TRUE.copy()
    gone[:, 1:] = 60
    for video in (still, gone):
        found = b.motion_accuracy(video, TRUE, b.arm_masks(SIM))
        assert found.track[0] == pytest.approx(np.mean([4 * t for t in range(1, FRAMES)]))
        assert found.overlap[0] < 0.1
    assert b.motion_accuracy(gone, TRUE, b.arm_masks(SIM)).overlap.tolist() == [0, 0]


def test_a_changed_colour_elsewhere_is_no_motion() -> None:
    drifted = TRUE.copy()
    drifted[:, 1:, 26:] = 200  # far from where the first arm passes
    found = b.motion_accuracy(drifted, TRUE, b.arm_masks(SIM))
    assert found.track[0] == 0


def test_without_an_arm_there_is_no_number() -> None:
    found = b.motion_accuracy(TRUE, TRUE, np.zeros(TRUE.shape[:-1], bool))
    assert np.isnan(found.track).all() and np.isnan(found.overlap).all()


def actions(seed: int = 0, width: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(3, 5, width)).astype(np.float32)


def test_changed_absolute_poses() -> None:
    given = actions()
    found = b.changed_actions(given, ActionConvention(), np.array([1, 2, 0]))
    assert tuple(found) == b.CHANGES
    assert (found["zero"][..., :6] == given[:, :1, :6]).all() and (found["zero"][..., 6] == given[..., 6]).all()
    np.testing.assert_allclose(
        found["negated"][..., :3] - given[:, :1, :3], given[:, :1, :3] - given[..., :3], atol=1e-6
    )
    assert (found["negated"][..., 3:] == given[..., 3:]).all()
    assert (np.sort(found["shuffled"], 1) == np.sort(given, 1)).all() and (found["shuffled"] != given).any()
    assert (found["other"] == given[[1, 2, 0]]).all()
    assert (given == actions()).all()


@pytest.mark.parametrize(("rotation", "width"), [("rotvec", 7), ("quaternion", 8)])
def test_changed_deltas(rotation: Any, width: int) -> None:
    convention = ActionConvention(kind="delta", relative_to="state", rotation=rotation)
    given = actions(width=width)
    found = b.changed_actions(given, convention, np.array([1, 2, 0]))
    assert (found["zero"][..., :3] == 0).all() and (found["negated"][..., :3] == -given[..., :3]).all()
    assert (found["negated"][..., -1] == given[..., -1]).all()
    if rotation == "quaternion":
        assert (found["zero"][..., 3:7] == (0, 0, 0, 1)).all() and (found["negated"][..., 3:7] == (0, 0, 0, 1)).all()
    else:
        assert (found["zero"][..., 3:6] == 0).all() and (found["negated"][..., 3:6] == -given[..., 3:6]).all()


def test_actions_that_are_no_poses_are_refused() -> None:
    with pytest.raises(SimForcingError, match="actions of 3 numbers are no poses"):
        b.changed_actions(actions(width=3), ActionConvention(), np.array([0, 1, 2]))


def test_places_of_the_changes() -> None:
    where = b.places(TRUE, np.array([1, 0]))
    own = where["zero"]
    assert own.shape == TRUE.shape[:-1] and (own[:, 0] == own[:, -1]).all()
    assert (where["other"] == (own | own[::-1])).all()
    assert (where["negated"] == own.any((0, 1))).all()
    assert own[0, 0, 9:17].any(1).all() and not own[0, 0, 20:].any()  # along the first walk, and nowhere else


def test_sensitivity_says_how_much_and_where() -> None:
    where = b.places(TRUE, np.array([1, 0]))["zero"]
    stays = np.repeat(TRUE[:, :1], FRAMES, 1)
    follows = b.sensitivity(stays, TRUE, where)
    assert (follows.inside == 1).all() and (follows.motion == 0).all() and (follows.change > 0).all()
    np.testing.assert_allclose(follows.area, where[:, 1:].mean((1, 2, 3)))
    ignores = b.sensitivity(TRUE, TRUE, where)
    assert (ignores.change == 0).all() and (ignores.motion == 1).all() and np.isnan(ignores.inside).all()
    brighter = TRUE.copy()
    brighter[:, 1:] += 10  # everywhere alike
    anywhere = b.sensitivity(brighter, TRUE, where)
    np.testing.assert_allclose(anywhere.inside, anywhere.area)
    np.testing.assert_allclose(anywhere.change, 10)
    assert set(anywhere.to_dict()) == {"change", "motion", "inside", "area"}
