"""By how many frames pictures, or states, follow the actions.

The lag is one of time: from when a target or a delta is recorded to when the picture moves as it says. Deltas that are
carried out at once have lag 0; absolute targets that are reached at the next row, as the convention has it, lag 1.

How much a robot is told to move between rows i and i + 1 is compared with how much the picture changes there, shifted
by every lag; the best correlation over all episodes is the lag.

Shapes: N rows of an episode, D width, M transitions between rows (N - 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

EARLIEST, LATEST = -3, 6
"""Lags that are tried, in frames."""

LEAST_CORRELATION, LEAST_TRANSITIONS = 0.25, 40
"""A weaker best correlation, or fewer transitions, give no estimate."""


@dataclass(frozen=True)
class Lag:
    """frames: positive where the picture comes after the action. correlation: at that lag."""

    frames: float
    correlation: float
    transitions: int


def speed(rows: Float[np.ndarray, "N D"], kind: str, gripper: int = 1) -> Float[np.ndarray, "M"]:
    """How much rows tell a robot to move in each transition: the size of deltas, or of the change of absolute values.

    Dimensions are divided by their own spread; the last `gripper` ones are left out where there are others. Jumps by a
    full turn do not count.
    """
    values = np.asarray(rows, np.float64)
    values = values[:, :-gripper] if values.shape[1] > gripper else values
    if kind == "absolute":
        values = np.diff(values, axis=0)
        values = np.where(np.abs(values) > np.pi, 0.0, values)
    else:
        values = values[:-1]
    scale = values.std(axis=0)
    return np.asarray(np.sqrt(((values / np.where(scale > 1e-9, scale, np.inf)) ** 2).sum(axis=1)))


def estimate(pairs: Sequence[tuple[Float[np.ndarray, "M"], Float[np.ndarray, "M"]]]) -> Lag | None:
    """Lag of the second series behind the first, over several episodes; None where that is not clear.

    The correlation is that of all transitions together, each episode's series brought to mean 0 and spread 1; the top
    of a parabola through the best lag and its neighbours gives fractions of a frame.
    """
    usable = [(_standard(a), _standard(b)) for a, b in pairs if len(a) == len(b) > LATEST - EARLIEST]
    usable = [(a, b) for a, b in usable if a.any() and b.any()]
    total = sum(len(a) for a, _ in usable)
    if total < LEAST_TRANSITIONS:
        return None
    lags = list(range(EARLIEST, LATEST + 1))
    scores = np.array([_correlation(usable, lag) for lag in lags])
    best = int(scores.argmax())
    if scores[best] < LEAST_CORRELATION or best in (0, len(lags) - 1):
        return None
    before, top, after = scores[best - 1 : best + 2]
    bend = before - 2 * top + after
    shift = 0.5 * (before - after) / bend if bend < 0 else 0.0
    return Lag(lags[best] + float(shift), float(top), total)


def _standard(series: Float[np.ndarray, "M"]) -> Float[np.ndarray, "M"]:
    spread = float(series.std())
    return np.asarray((series - series.mean()) / spread) if spread > 1e-9 else np.zeros_like(series)


def _correlation(pairs: Sequence[tuple[Float[np.ndarray, "M"], Float[np.ndarray, "M"]]], lag: int) -> float:
    """Mean product of a[i] and b[i + lag] over all transitions that have both."""
    products = [a[max(0, -lag) : len(a) - max(0, lag)] * b[max(0, lag) : len(b) + min(0, lag)] for a, b in pairs]
    return float(np.concatenate(products).mean())
