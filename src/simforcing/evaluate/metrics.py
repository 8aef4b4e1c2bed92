"""What a predicted clip is worth: four numbers a clip, each with one definition.

Shapes: B clips, T frames, H W pixels. Videos are uint8 RGB, ``B T H W 3``. Frame 0 is given to the model,
so every metric leaves it out unless ``first_frame=True``. Values are float64, one a clip; nan marks a clip
on which the metric is not defined, and `statistics.bootstrap` counts those.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol as Interface
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float64, UInt8
from pytorch_msssim import ssim as windowed_ssim

from simforcing.errors import SimForcingError

Videos: TypeAlias = UInt8[np.ndarray, "B T H W 3"]
PerClip: TypeAlias = Float64[np.ndarray, " B"]
PerFrame: TypeAlias = Float64[np.ndarray, "B S"]

PEAK = 255.0
PSNR_CAP = 100.0
"""dB. Identical clips have no error and an infinite PSNR; the cap keeps means and intervals finite."""
MOVING_THRESHOLD = 16
"""Grey levels of 255 by which a channel must change for its pixel to count as moving."""
MOVING_MINIMUM = 64
"""Moving pixels (over all scored frames of a clip) below which PSNR on moving pixels is not defined."""
SSIM_WINDOW = 11
SSIM_SIGMA = 1.5
LUMA = np.array([0.299, 0.587, 0.114])


def psnr(pred: Videos, true: Videos, *, first_frame: bool = False) -> PerClip:
    """Peak signal-to-noise ratio of each clip, in dB.

    ``10 log10(255^2 / MSE)``, the MSE pooled over all scored frames, pixels and channels of the clip (not
    the mean of per-frame PSNRs, which is never smaller), capped at `PSNR_CAP` so that an identical clip
    scores 100 dB.
    """
    return np.array([_decibel(float(np.mean(_squared(p, t)))) for p, t in _clips(pred, true, first_frame)])


def psnr_moving(
    pred: Videos,
    true: Videos,
    *,
    first_frame: bool = False,
    threshold: int = MOVING_THRESHOLD,
    minimum: int = MOVING_MINIMUM,
) -> PerClip:
    """PSNR in dB over the pixels of `moving_mask`, squared errors pooled over all scored frames of a clip.

    The mask comes from the true clip alone, so every method is scored on the same pixels. A clip with fewer
    than ``minimum`` moving pixels scores nan. Capped like `psnr`.
    """
    masks = moving_mask(true, threshold=threshold)[:, 0 if first_frame else 1 :]
    values = []
    for (p, t), mask in zip(_clips(pred, true, first_frame), masks, strict=True):
        enough = int(mask.sum()) >= max(minimum, 1)
        values.append(_decibel(float(np.mean(_squared(p[mask], t[mask])))) if enough else np.nan)
    return np.array(values)


def moving_mask(true: Videos, *, threshold: int = MOVING_THRESHOLD) -> Bool[np.ndarray, "B T H W"]:
    """Pixels of the true clip that move, dilated by one pixel.

    A pixel of frame t moves when one of its channels differs by more than ``threshold`` grey levels from
    frame 0 or from frame t-1 of the same clip: what the arm covers now, what it has left, and what it
    uncovered a frame ago. Each frame's mask is then dilated by a 3x3 square. Frame 0 never moves.
    """
    _check(true, true, first_frame=True)
    masks = np.zeros(true.shape[:-1], dtype=bool)
    for clip, mask in zip(true, masks, strict=True):
        signed = clip.astype(np.int16)
        from_start = np.abs(signed[1:] - signed[:1]).max(-1) > threshold
        from_previous = np.abs(signed[1:] - signed[:-1]).max(-1) > threshold
        mask[1:] = _dilate(from_start | from_previous)
    return masks


def ssim(pred: Videos, true: Videos, *, first_frame: bool = False) -> PerClip:
    """Structural similarity of each clip, in [-1, 1].

    `pytorch_msssim.ssim` in float32 (within 1e-6 of float64, four times faster): Gaussian window 11x11 with
    sigma 1.5, population covariance, K = (0.01, 0.03), data range 255, whole windows only (no padding);
    mean over positions and RGB channels of each frame, then over the scored frames. Raises
    `SimForcingError` for frames smaller than the window.
    """
    if min(true.shape[2:4]) < SSIM_WINDOW:
        raise SimForcingError(
            f"SSIM needs frames of at least {SSIM_WINDOW}x{SSIM_WINDOW} pixels, got {list(true.shape[2:4])}"
        )
    values = []
    for p, t in _clips(pred, true, first_frame):
        x, y = (torch.from_numpy(v.transpose(0, 3, 1, 2).astype(np.float32)) for v in (p, t))
        each = windowed_ssim(x, y, data_range=PEAK, size_average=False, win_size=SSIM_WINDOW, win_sigma=SSIM_SIGMA)
        values.append(float(each.double().mean()))
    return np.array(values)


def sharpness(pred: Videos, true: Videos, *, first_frame: bool = False) -> PerClip:
    """How sharp each clip is against the true one: 1 as sharp, below 1 blurred, above 1 noisy.

    Mean gradient magnitude of the prediction divided by that of the truth: luma (0.299 R + 0.587 G + 0.114
    B), forward differences dx and dy, mean of ``sqrt(dx^2 + dy^2)`` over all pixels and scored frames. nan
    where the true clip is flat.
    """
    values = []
    for p, t in _clips(pred, true, first_frame):
        truth = _gradient(t)
        values.append(_gradient(p) / truth if truth > 0 else np.nan)
    return np.array(values)


def psnr_by_frame(pred: Videos, true: Videos, *, first_frame: bool = False) -> PerFrame:
    """PSNR in dB of every scored frame (S = T - 1, or T with the first frame): quality against horizon.

    The MSE is pooled over the pixels and channels of one frame; capped like `psnr`.
    """
    errors = [_squared(p, t).mean(axis=(1, 2, 3)) for p, t in _clips(pred, true, first_frame)]
    return np.array([[_decibel(float(e)) for e in clip] for clip in errors])


class _Score(Interface):
    def __call__(self, pred: Videos, true: Videos, *, first_frame: bool = False) -> PerClip: ...


@dataclass(frozen=True)
class Metric:
    """A metric and how to write it: name, unit, digits after the point, and which way is better.

    ``better`` is +1 where more is better, -1 where less is, 0 where the aim is a value in between
    (sharpness: 1).
    """

    key: str
    label: str
    unit: str
    digits: int
    better: int
    definition: str
    score: _Score


_PSNR = (
    "10 log10(255² / MSE), MSE pooled over the predicted frames, pixels and channels of a clip; "
    f"at most {PSNR_CAP:.0f} dB (identical clips)"
)
_PSNR_MOVING = (
    f"PSNR over the pixels whose true value differs by more than {MOVING_THRESHOLD}/255 in a channel from "
    "the clip's first frame or from the frame before, dilated by one pixel, pooled over the predicted "
    f"frames; undefined for clips with fewer than {MOVING_MINIMUM} such pixels"
)
_SSIM = (
    f"Gaussian window {SSIM_WINDOW}×{SSIM_WINDOW}, sigma {SSIM_SIGMA}, population covariance, data "
    "range 255, whole windows only; mean over RGB and the predicted frames"
)
_SHARPNESS = "mean gradient magnitude of the prediction's luma divided by the true clip's; 1 is as sharp as the truth"

METRICS: dict[str, Metric] = {
    m.key: m
    for m in (
        Metric("psnr", "PSNR", "dB", 2, 1, _PSNR, psnr),
        Metric("psnr_moving", "PSNR, moving pixels", "dB", 2, 1, _PSNR_MOVING, psnr_moving),
        Metric("ssim", "SSIM", "", 3, 1, _SSIM, ssim),
        Metric("sharpness", "Sharpness", "", 2, 0, _SHARPNESS, sharpness),
    )
}


def score(pred: Videos, true: Videos, *, first_frame: bool = False) -> dict[str, PerClip]:
    """Every metric of `METRICS` for every clip, by its key."""
    return {key: metric.score(pred, true, first_frame=first_frame) for key, metric in METRICS.items()}


def definitions() -> dict[str, str]:
    """The exact definition of each metric in one sentence, for a protocol or a page."""
    return {key: metric.definition for key, metric in METRICS.items()}


def _check(pred: Videos, true: Videos, first_frame: bool) -> None:
    for name, videos in (("predicted", pred), ("true", true)):
        if videos.dtype != np.uint8 or videos.ndim != 5 or videos.shape[-1] != 3:
            raise SimForcingError(
                f"{name} videos must be uint8 [B, T, H, W, 3], got {videos.dtype} {list(videos.shape)}"
            )
    if pred.shape != true.shape:
        raise SimForcingError(
            f"predicted and true videos differ in shape: {list(pred.shape)} against {list(true.shape)}"
        )
    if true.shape[1] < (1 if first_frame else 2):
        raise SimForcingError("clips of one frame have no predicted frame to score; pass first_frame=True to score it")


def _clips(
    pred: Videos, true: Videos, first_frame: bool
) -> Iterator[tuple[UInt8[np.ndarray, "S H W 3"], UInt8[np.ndarray, "S H W 3"]]]:
    """Checked pairs of scored frames, one clip at a time (so that float copies stay small)."""
    _check(pred, true, first_frame)
    skip = 0 if first_frame else 1
    for p, t in zip(pred, true, strict=True):
        yield p[skip:], t[skip:]


def _squared(pred: UInt8[np.ndarray, "..."], true: UInt8[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
    return np.square(pred.astype(np.float64) - true.astype(np.float64))


def _decibel(mse: float) -> float:
    return PSNR_CAP if mse <= 0 else min(PSNR_CAP, float(10 * np.log10(PEAK**2 / mse)))


def _dilate(mask: Bool[np.ndarray, "T H W"]) -> Bool[np.ndarray, "T H W"]:
    height, width = mask.shape[1:]
    padded = np.pad(mask, ((0, 0), (1, 1), (1, 1)))
    shifted = [padded[:, y : y + height, x : x + width] for y in range(3) for x in range(3)]
    dilated: Bool[np.ndarray, "T H W"] = np.stack(shifted).max(axis=0)
    return dilated


def _gradient(frames: UInt8[np.ndarray, "S H W 3"]) -> float:
    luma = frames.astype(np.float64) @ LUMA
    dx = luma[:, :-1, 1:] - luma[:, :-1, :-1]
    dy = luma[:, 1:, :-1] - luma[:, :-1, :-1]
    return float(np.hypot(dx, dy).mean())
