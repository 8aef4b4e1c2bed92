"""Predictions that are longer than a window."""

import numpy as np
import pytest

from simforcing.errors import InputError
from simforcing.predict.predictor import Prediction, Start
from simforcing.predict.rollout import rollout

CLIPS, FRAMES, SIZE = 2, 5, 4


def start(sim: bool = True) -> Start:
    first = np.full((CLIPS, SIZE, SIZE, 3), 10, np.uint8)
    no_action, no_state = np.zeros((CLIPS, 4, 7), np.float32), np.zeros((CLIPS, 7), np.float32)
    return Start(first, no_action, no_state, ["go"] * CLIPS, first + 100 if sim else None, seeds=[5, 6])


def brighter(begin: Start, k: int) -> Prediction:
    """Each frame is brighter than the one before by the first number of its action."""
    gains = np.concatenate([np.zeros((CLIPS, 1)), begin.action[:, :, 0].cumsum(axis=1)], axis=1)
    gains = gains.astype(np.uint8)[:, :, None, None, None]
    sim = None if begin.sim_first is None else begin.sim_first[:, None] + gains
    return Prediction(begin.real_first[:, None] + gains, sim)


def test_each_window_goes_on_from_the_last_frame_of_the_one_before() -> None:
    action = np.ones((CLIPS, 3, 4, 7), np.float32)
    action[1, 2] = 2
    made = rollout(brighter, start(), action, np.zeros((CLIPS, 3, 7), np.float32))
    assert made.real.shape == (CLIPS, 1 + 3 * 4, SIZE, SIZE, 3)
    assert made.real[0, :, 0, 0, 0].tolist() == list(range(10, 23))
    assert made.real[1, :, 0, 0, 0].tolist() == [*range(10, 19), 20, 22, 24, 26]
    assert made.sim is not None and (made.sim == made.real + 100).all()


def test_a_window_gets_its_own_actions_state_and_noise() -> None:
    seen = []

    def window(begin: Start, k: int) -> Prediction:
        seen.append((k, begin.action[0, 0, 0], begin.proprio[1, 0], begin.seeds))
        return brighter(begin, k)

    action = np.arange(2, dtype=np.float32)[None, :, None, None] * np.ones((CLIPS, 2, 4, 7), np.float32)
    proprio = np.arange(2, dtype=np.float32)[None, :, None] * np.full((CLIPS, 2, 7), 3, np.float32)
    made = rollout(window, start(sim=False), action, proprio)
    assert seen == [(0, 0, 0, [5, 6]), (1, 1, 3, [5 + 2**32, 6 + 2**32])]
    assert made.sim is None


def test_one_window_is_the_window() -> None:
    action = np.ones((CLIPS, 1, 4, 7), np.float32)
    made = rollout(brighter, start(), action, np.zeros((CLIPS, 1, 7), np.float32))
    alone = brighter(Start(start().real_first, action[:, 0], np.zeros((CLIPS, 7), np.float32), ["go"] * CLIPS), 0)
    np.testing.assert_array_equal(made.real, alone.real)


@pytest.mark.parametrize("windows", [(0, 0), (2, 3)])
def test_windows_that_do_not_agree_are_refused(windows: tuple[int, int]) -> None:
    action, proprio = np.zeros((CLIPS, windows[0], 4, 7)), np.zeros((CLIPS, windows[1], 7))
    with pytest.raises(InputError, match="the same clips and windows, at least one"):
        rollout(brighter, start(), action.astype(np.float32), proprio.astype(np.float32))
