"""Predictions longer than one window: the last predicted frame begins the next.

Legend: B batch, W windows, T frames of a window, A actions of a window, H W pixels.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from jaxtyping import Float32, UInt8

from simforcing.errors import InputError
from simforcing.predict.predictor import Prediction, Start

Videos = UInt8[np.ndarray, "B T H W 3"]
Window = Callable[[Start, int], Prediction]
"""Predicts one window, given what it starts from and its number."""


def rollout(
    window: Window,
    start: Start,
    action: Float32[np.ndarray, "B W A a"],
    proprio: Float32[np.ndarray, "B W p"],
) -> Prediction:
    """Videos [B, 1 + W (T - 1), H, W, 3] under the actions of W windows, each from the last frame of the one before.

    `start` is that of the first window. proprio: the state at the start of each window, as a plan or a recording has
    it. Where a window predicts its simulation, the next begins with the last simulated frame; else it has none to
    begin with but what `window` itself brings. The noise of window k of a clip with seed s follows from s + k 2^32.
    Errors add up from window to window: nothing corrects what is drawn wrong.

    Raises:
        InputError: actions and states are of different numbers of windows, or of none.
    """
    if action.shape[:2] != proprio.shape[:2] or action.shape[1] == 0:
        raise InputError(
            f"action of shape {list(action.shape)} and proprio of shape {list(proprio.shape)} must have the same "
            "clips and windows, at least one"
        )
    seeds = list(range(len(start))) if start.seeds is None else list(start.seeds)
    parts: list[Prediction] = []
    for k in range(action.shape[1]):
        start = replace(start, action=action[:, k], proprio=proprio[:, k], seeds=[s + (k << 32) for s in seeds])
        made = window(start, k)
        parts.append(made)
        sim_first = start.sim_first if made.sim is None else made.sim[:, -1]
        start = replace(start, real_first=made.real[:, -1], sim_first=sim_first)
    sims = [p.sim for p in parts if p.sim is not None]
    return Prediction(_joined([p.real for p in parts]), _joined(sims) if sims else None)


def _joined(videos: list[Videos]) -> Videos:
    """One video after the other, the frame that they share once."""
    return np.concatenate([videos[0], *(video[:, 1:] for video in videos[1:])], axis=1)
