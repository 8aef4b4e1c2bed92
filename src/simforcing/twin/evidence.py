"""What moves in a video, and how well a moving silhouette explains it.

Two frames of a fixed camera differ where the arm was in one of them and is not in the other. How they differ at a
pixel is one of three things: not at all; as under a shadow or another exposure (all channels by the same factor);
or otherwise. How often each happens where one silhouette, both, or none covers the pixel is known well enough; the
logarithm of the ratio to `none` is the evidence that a pair of silhouettes collects.

Legend: T frames, P pairs of frames, H W size in pixels.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Int, UInt8
from PIL import Image

_Odds = tuple[float, float, float]
# How often a pixel does not change, changes like a shadow, changes otherwise.
_ONE: _Odds = (0.28, 0.37, 0.35)  # the arm in one of the two frames
_BOTH: _Odds = (0.68, 0.20, 0.12)  # the arm in both, but another part of it
_NONE: _Odds = (0.88, 0.075, 0.045)  # shadows, cables, things that are pushed
_FLOOR, _RISE = 0.02, 0.10  # grey levels of 1: a change starts above noise plus floor, and is certain after the rise
_SHADOW_SPREAD, _SHADOW_DEPTH = 0.12, 1.1  # a shadow: log ratios of the channels agree, and are not larger
_DARK = 0.04  # added before logarithms of grey levels of 1


def reduced(frames: UInt8[np.ndarray, "T H0 W0 3"], height: int, width: int) -> Float32[np.ndarray, "T H W 3"]:
    """Frames averaged down to a size, values in [0, 1]."""
    small = [np.asarray(Image.fromarray(f).resize((width, height), Image.Resampling.BOX)) for f in frames]
    return np.stack(small).astype(np.float32) / 255


@dataclass(frozen=True)
class Change:
    """How pairs of frames differ: `shadow` and `other` in [0, 1] a pixel, the rest is no change."""

    shadow: Float32[np.ndarray, "P H W"]
    other: Float32[np.ndarray, "P H W"]

    @classmethod
    def between(cls, frames: Float32[np.ndarray, "T H W 3"], pairs: Int[np.ndarray, "P 2"]) -> "Change":
        """The change between frames of each pair; a change of the whole picture's level is none."""
        one, two = frames[pairs[:, 0]], frames[pairs[:, 1]]
        difference = _centred(one - two)
        size = np.abs(difference).max(axis=-1)
        noise = 1.4826 * float(np.median(size))
        changed = np.clip((size - 3 * noise - _FLOOR) / _RISE, 0.0, 1.0)
        ratio = _centred(np.log(one + _DARK) - np.log(two + _DARK))
        mean = ratio.mean(axis=-1)
        spread = np.abs(ratio - mean[..., None]).max(axis=-1)
        like = np.clip(1.5 - spread / _SHADOW_SPREAD, 0, 1) * np.clip((_SHADOW_DEPTH - np.abs(mean)) / 0.2, 0, 1)
        shadow = (changed * like).astype(np.float32)
        return cls(shadow, (changed - shadow).astype(np.float32))

    @property
    def any(self) -> Float32[np.ndarray, "P H W"]:
        """Share of a pixel that changed in whatever way."""
        return np.asarray(self.shadow + self.other)


def _centred(values: Float32[np.ndarray, "P H W 3"]) -> Float32[np.ndarray, "P H W 3"]:
    return np.asarray(values - np.median(values, axis=(1, 2), keepdims=True), dtype=np.float32)


class Evidence:
    """What masks of `frames` are worth, by the changes between `pairs` of them."""

    def __init__(self, frames: Float32[np.ndarray, "T H W 3"], pairs: Int[np.ndarray, "P 2"]) -> None:
        self.pairs = pairs
        self.change = Change.between(frames, pairs)
        self._one, self._both = self._gain(_ONE), self._gain(_BOTH)

    def _gain(self, odds: _Odds) -> Float32[np.ndarray, "P H W"]:
        still, shadow, other = (np.log(a / b) for a, b in zip(odds, _NONE, strict=True))
        change = self.change
        gain = still * (1 - change.any) + shadow * change.shadow + other * change.other
        return np.asarray(gain, dtype=np.float32)

    def score(self, masks: Bool[np.ndarray, "T H W"], shifted: Bool[np.ndarray, "P H W"]) -> float:
        """Mean log likelihood ratio a pixel (nats) of the masks against no arm at all; larger is better.

        shifted: of each pair, where the arm's surface in its first frame is elsewhere in the second. Where the arm
        covers a pixel in both frames and has hardly moved, nothing is expected.
        """
        one, two = masks[self.pairs[:, 0]], masks[self.pairs[:, 1]]
        both = one & two & shifted
        gained = float(self._one[one ^ two].sum(dtype=np.float64)) + float(self._both[both].sum(dtype=np.float64))
        return gained / self._one.size


@dataclass(frozen=True)
class Agreement:
    """Predicted against observed motion. `overlap`: intersection over union of pixels that change, but for those
    that the arm covers in both frames (1 is perfect). `distance`: mean distance in pixels of the full picture from
    changed pixels to the nearest ones of the other kind, both ways, each capped at a tenth of the width.
    """

    overlap: float
    distance: float


def agreement(change: Change, masks: Bool[np.ndarray, "T H W"], pairs: Int[np.ndarray, "P 2"], width: int) -> Agreement:
    """How well masks of frames predict where pairs of frames differ; `width` of the full picture scales pixels."""
    from scipy.ndimage import distance_transform_edt

    def distance(these: Bool[np.ndarray, "H W"], those: Bool[np.ndarray, "H W"]) -> float:
        return float(np.minimum(distance_transform_edt(~those)[these], cap).mean()) if those.any() else cap

    cap = masks.shape[-1] / 10
    common = union = 0
    distances = []
    for amount, (s, t) in zip(change.any, pairs, strict=True):
        predicted = masks[s] ^ masks[t]
        seen = (amount > 0.5) & ~(masks[s] & masks[t])
        common += int((predicted & seen).sum())
        union += int((predicted | seen).sum())
        distances += [distance(a, b) for a, b in ((seen, predicted), (predicted, seen)) if a.any()]
    scale = width / masks.shape[-1]
    return Agreement(common / max(union, 1), scale * float(np.mean(distances) if distances else cap))
