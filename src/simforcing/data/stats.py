"""Min/max normaliser of actions and states, as the released checkpoints use it.

Shapes: N rows, D action or state width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32

from simforcing.errors import SimForcingError

CONSTANT_RANGE = 1e-4
"""A dimension whose range is smaller than this is only shifted, not scaled."""

CLAMP = 5.0
"""Normalised values are cut to [-CLAMP, CLAMP]."""


@dataclass(frozen=True)
class Normalizer:
    """Maps each dimension's [min, max] to [-1, 1]; all arithmetic is float32.

    scale = 2 / (max - min), offset = -1 - scale * min, y = clamp(x * scale + offset, -5, 5). A (nearly)
    constant dimension gets scale 1 and offset -min.
    """

    min: Float32[np.ndarray, "D"]
    max: Float32[np.ndarray, "D"]

    def __post_init__(self) -> None:
        low, high = (np.asarray(value, np.float32) for value in (self.min, self.max))
        if low.ndim != 1 or low.shape != high.shape:
            raise SimForcingError(
                f"statistics: min has shape {list(low.shape)}, max {list(high.shape)}; give two equal vectors"
            )
        if not (np.isfinite(low).all() and np.isfinite(high).all() and (high >= low).all()):
            raise SimForcingError(
                "statistics: min and max must be finite with min <= max; compute them anew from clean data"
            )
        object.__setattr__(self, "min", low)
        object.__setattr__(self, "max", high)

    @classmethod
    def fit(cls, rows: np.ndarray | Iterable[np.ndarray]) -> Normalizer:
        """Statistics of rows [N, D], or of several such arrays (one an episode), over whole episodes.

        Raises SimForcingError if there are no rows or a value is not finite (names the array and dimension).
        """
        low: np.ndarray | None = None
        high: np.ndarray | None = None
        for i, part in enumerate([rows] if isinstance(rows, np.ndarray) else rows):
            part = np.asarray(part, np.float32)
            if part.ndim != 2 or (low is not None and part.shape[1] != len(low)):
                raise SimForcingError(
                    f"statistics: array {i} has shape {list(part.shape)}; give rows [N, D] of one width"
                )
            if len(part) == 0:
                continue
            bad = np.flatnonzero(~np.isfinite(part).all(axis=0))
            if len(bad):
                raise SimForcingError(
                    f"statistics: array {i} has values that are not finite in dimension {bad[0]}; clean the data"
                )
            low = part.min(axis=0) if low is None else np.minimum(low, part.min(axis=0))
            high = part.max(axis=0) if high is None else np.maximum(high, part.max(axis=0))
        if low is None or high is None:
            raise SimForcingError("statistics: no rows to compute them from; the selection of episodes is empty")
        return cls(low, high)

    @property
    def scale(self) -> Float32[np.ndarray, "D"]:
        """Factor per dimension."""
        span = self.max - self.min
        return np.where(span < CONSTANT_RANGE, np.float32(1), np.float32(2) / np.where(span == 0, np.float32(1), span))

    @property
    def offset(self) -> Float32[np.ndarray, "D"]:
        """Summand per dimension."""
        constant = self.max - self.min < CONSTANT_RANGE
        return np.where(constant, -self.min, np.float32(-1) - self.scale * self.min)

    def normalize(self, x: np.ndarray) -> Float32[np.ndarray, "... D"]:
        """Stored units -> about [-1, 1], cut to [-5, 5]. `x` is [..., D]."""
        self._check(x)
        scaled: np.ndarray = np.asarray(x, np.float32) * self.scale + self.offset
        return scaled.clip(-CLAMP, CLAMP)

    def denormalize(self, y: np.ndarray) -> Float32[np.ndarray, "... D"]:
        """Inverse of `normalize` where nothing was cut."""
        self._check(y)
        stored: np.ndarray = (np.asarray(y, np.float32) - self.offset) / self.scale
        return stored

    def _check(self, x: np.ndarray) -> None:
        if x.shape[-1:] != self.min.shape:
            raise SimForcingError(f"normaliser of width {len(self.min)}: got an array of shape {list(x.shape)}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; float32 values survive the round trip exactly."""
        return {"kind": "min_max", "min": self.min.tolist(), "max": self.max.tolist()}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Normalizer:
        """Read `to_dict`'s form, or one entry of a released `dataset_stats.json` (its other statistics are
        not used).
        """
        kind = stored.get("kind", "min_max")
        if kind != "min_max" or "min" not in stored or "max" not in stored:
            raise SimForcingError(
                f"statistics: expected kind min_max with min and max, got kind {kind!r} with {sorted(stored)}"
            )
        return cls(np.asarray(stored["min"], np.float32), np.asarray(stored["max"], np.float32))
