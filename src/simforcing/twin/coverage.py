"""How much of the space of states and actions a dataset visits, before and after augmentation.

Shapes: N rows of an episode, S state width, A action width.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32
from PIL import Image

from simforcing.twin.sheets import histograms

_BINS = 20
_CUBE = 0.05  # in the unit of the positions, metres


class Coverage:
    """Collects states and actions of recorded (`before`) and simulated episodes."""

    def __init__(self, state_names: Sequence[str], action_names: Sequence[str]) -> None:
        self.names = {"state": tuple(state_names), "action": tuple(action_names)}
        self._rows: dict[tuple[str, str], list[Float32[np.ndarray, "N D"]]] = {
            (what, when): [] for what in self.names for when in ("before", "added")
        }

    def add_before(self, state: Float32[np.ndarray, "N S"], action: Float32[np.ndarray, "N A"]) -> None:
        """A recorded episode."""
        self._add("before", state, action)

    def add_after(self, state: Float32[np.ndarray, "N S"], action: Float32[np.ndarray, "N A"]) -> None:
        """A simulated episode."""
        self._add("added", state, action)

    def _add(self, when: str, state: Float32[np.ndarray, "N S"], action: Float32[np.ndarray, "N A"]) -> None:
        self._rows["state", when].append(state)
        self._rows["action", when].append(action)

    def _both(self, what: str) -> tuple[Float32[np.ndarray, "a D"], Float32[np.ndarray, "b D"]]:
        """Rows before, and after: recorded and simulated together."""
        before = np.concatenate(self._rows[what, "before"])
        return before, np.concatenate([before, *self._rows[what, "added"]])

    def numbers(self) -> dict[str, Any]:
        """Per dimension the range and the share of 20 bins that is filled, before and after; cubes visited."""
        out: dict[str, Any] = {}
        for what, names in self.names.items():
            before, after = self._both(what)
            for i, name in enumerate(names):
                bins = np.linspace(after[:, i].min(), max(after[:, i].max(), after[:, i].min() + 1e-6), _BINS + 1)
                out[f"{what}.{name}"] = {
                    when: {
                        "min": round(float(rows[:, i].min()), 4),
                        "max": round(float(rows[:, i].max()), 4),
                        "filled": round(float((np.histogram(rows[:, i], bins)[0] > 0).mean()), 3),
                    }
                    for when, rows in (("before", before), ("after", after))
                }
        before, after = self._both("state")
        out["places"] = {"before": _cubes(before), "after": _cubes(after)}
        return out

    def table(self) -> tuple[tuple[str, ...], list[tuple[list[Any], bool]]]:
        """`numbers` as columns and rows of a page."""
        numbers = self.numbers()
        places = numbers.pop("places")
        rows: list[tuple[list[Any], bool]] = [
            (
                [
                    f"{n['before']['min']:g} to {n['before']['max']:g}",
                    f"{n['after']['min']:g} to {n['after']['max']:g}",
                    f"{100 * n['before']['filled']:.0f} %",
                    f"{100 * n['after']['filled']:.0f} %",
                    name,
                ],
                False,
            )
            for name, n in numbers.items()
        ]
        rows.append((["", "", places["before"], places["after"], "places (cubes of 5 cm)"], False))
        return ("range before", "range after", "filled before", "filled after", "of"), rows

    def write(self, folder: Path) -> dict[str, Path]:
        """`coverage.json`, and pictures of the histograms of states and actions; returns the pictures by title."""
        (folder / "coverage.json").write_text(json.dumps(self.numbers(), indent=1) + "\n", encoding="utf-8")
        pictures = {}
        for what, names in self.names.items():
            picture = folder / f"coverage_{what}.png"
            Image.fromarray(histograms(*self._both(what), names)).save(picture)
            pictures[f"{what}s: histograms before and after"] = picture
        return pictures


def _cubes(rows: Float32[np.ndarray, "N S"]) -> int:
    """Number of cubes with an edge of 5 cm that the first three numbers visit."""
    return len(np.unique(np.floor(rows[:, :3].astype(np.float64) / _CUBE).astype(int), axis=0))
