"""What a predicted clip is worth: a few numbers a clip, each with one definition.

Shapes: B clips, T frames, H W pixels. Videos are uint8 RGB, ``B T H W 3``. Frame 0 is given to the model,
so every metric leaves it out unless ``first_frame=True``. Values are float64, one a clip; nan marks a clip
on which the metric is not defined, and `statistics.bootstrap` counts those. Every clip is scored by itself: no number
depends on how clips are batched. `METRICS` also names what `perceptual` measures through networks.
"""

from collections.abc import Collection, Iterator
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
    return np.array([_decibel(float(np.mean(_squared(p, t)))) for p, t in scored_clips(pred, true, first_frame)])


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
    for (p, t), mask in zip(scored_clips(pred, true, first_frame), masks, strict=True):
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
    for p, t in scored_clips(pred, true, first_frame):
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
    for p, t in scored_clips(pred, true, first_frame):
        truth = _gradient(t)
        values.append(_gradient(p) / truth if truth > 0 else np.nan)
    return np.array(values)


def psnr_by_frame(pred: Videos, true: Videos, *, first_frame: bool = False) -> PerFrame:
    """PSNR in dB of every scored frame (S = T - 1, or T with the first frame): quality against horizon.

    The MSE is pooled over the pixels and channels of one frame; capped like `psnr`.
    """
    errors = [_squared(p, t).mean(axis=(1, 2, 3)) for p, t in scored_clips(pred, true, first_frame)]
    return np.array([[_decibel(float(e)) for e in clip] for clip in errors])


def temporal_error(pred: Videos, true: Videos, *, first_frame: bool = False) -> PerClip:
    """How wrong the changes from frame to frame are: 0 as in the truth, 1 as wrong as a video that stands still.

    Squared error of the frame-to-frame differences divided by the energy of the true ones, both summed over the whole
    clip; the first difference leads from the given frame to the first predicted one, whatever ``first_frame`` says.
    Blind to an error that stays the same, such as a shifted colour. nan where the true clip stands still.
    """
    values = []
    for p, t in scored_clips(pred, true, True):
        moves, truth = (np.diff(v.astype(np.float64), axis=0) for v in (p, t))
        energy = np.square(truth).sum()
        values.append(np.square(moves - truth).sum() / energy if energy > 0 else np.nan)
    return np.array(values)


def flicker(pred: Videos, true: Videos, *, first_frame: bool = False) -> PerClip:
    """Change from frame to frame where the true clip stands still, in grey levels of 255.

    Mean absolute difference between adjacent frames (the first from the given frame) over pixels and channels that lie
    in neither frame's `moving_mask`; nan with fewer than `MOVING_MINIMUM` of them. A true clip has its sensor noise.
    """
    masks, values = moving_mask(true), []
    for (p, _), mask in zip(scored_clips(pred, true, True), masks, strict=True):
        still = ~(mask[1:] | mask[:-1])
        change = np.abs(np.diff(p.astype(np.int16), axis=0))[still]
        values.append(float(change.mean()) if still.sum() >= MOVING_MINIMUM else np.nan)
    return np.array(values)


def colour_drift_by_frame(pred: Videos, true: Videos, *, first_frame: bool = False) -> PerFrame:
    """Shift of the mean colour of every scored frame against the true one, in grey levels of 255.

    Absolute difference of the channels' means over the pixels outside `moving_mask`, averaged over RGB, so that an arm
    in the wrong place counts little; nan for frames with fewer than `MOVING_MINIMUM` such pixels.
    """
    masks, rows = moving_mask(true)[:, 0 if first_frame else 1 :], []
    for (p, t), mask in zip(scored_clips(pred, true, first_frame), masks, strict=True):
        still = ~mask[..., None]
        count = still.sum((1, 2))
        sums = ((p.astype(np.float64) - t) * still).sum((1, 2))
        rows.append(np.where(count[:, 0] >= MOVING_MINIMUM, np.abs(sums / np.maximum(count, 1)).mean(-1), np.nan))
    return np.array(rows)


def colour_drift(pred: Videos, true: Videos, *, first_frame: bool = False) -> PerClip:
    """`colour_drift_by_frame` averaged over the scored frames on which it is defined."""
    rows = colour_drift_by_frame(pred, true, first_frame=first_frame)
    defined = ~np.isnan(rows)
    total = np.where(defined, rows, 0).sum(1)
    return np.where(defined.any(1), total / np.maximum(defined.sum(1), 1), np.nan)


class _Score(Interface):
    def __call__(self, pred: Videos, true: Videos, *, first_frame: bool = False) -> PerClip: ...


@dataclass(frozen=True)
class Metric:
    """A metric and how to write it: name, unit, digits after the point, and which way is better.

    ``better`` is +1 where more is better, -1 where less is, 0 where the aim is a value in between
    (sharpness: 1). ``score`` is None for what needs more than two videos: `perceptual`, `behaviour`.
    """

    key: str
    label: str
    unit: str
    digits: int
    better: int
    definition: str
    score: _Score | None = None


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
_TEMPORAL = (
    "squared error of the frame-to-frame differences divided by the energy of the true ones; "
    "0 is perfect, 1 as wrong as a still picture"
)
_FLICKER = "mean absolute change from frame to frame on pixels that stand still in the true clip, grey levels of 255"
_DRIFT = (
    "absolute difference of a frame's mean colour from the true one, outside moving pixels, mean over RGB and the "
    "predicted frames, grey levels of 255"
)
_LPIPS = (
    "version 0.1 with linear heads on {}, values scaled to [-1, 1], frames at their own size, mean over the "
    "predicted frames"
)
_FID = (
    "Fréchet distance of 2048 Inception-v3 features (TorchScript of TensorFlow's weights of 2015-12-05, frames resized "
    "to 299×299 by it), all predicted frames of all clips against the true ones"
)
_FVD = (
    "Fréchet distance of 400 I3D features (StyleGAN-V's TorchScript, frames resized to 224×224 by it), one vector a "
    "clip from all its predicted frames"
)
_CODEC = (
    "stand-in, comparable with neither FID nor FVD: Fréchet distance of channel means and deviations of the codec's "
    "predicted latent frames"
)
_TRACK = (
    "distance of the arm's centroid from the true one, mean over the predicted frames; arm: pixels that differ from "
    "the clip's background, looked for where the twin's arm passes"
)
_OVERLAP = "intersection over union of the arm's pixels with the true ones, mean over the predicted frames"

BASIC = ("psnr", "psnr_moving", "ssim", "sharpness")
"""What every table shows."""

METRICS: dict[str, Metric] = {
    m.key: m
    for m in (
        Metric("psnr", "PSNR", "dB", 2, 1, _PSNR, psnr),
        Metric("psnr_moving", "PSNR, moving pixels", "dB", 2, 1, _PSNR_MOVING, psnr_moving),
        Metric("ssim", "SSIM", "", 3, 1, _SSIM, ssim),
        Metric("sharpness", "Sharpness", "", 2, 0, _SHARPNESS, sharpness),
        Metric("lpips_alex", "LPIPS (AlexNet)", "", 4, -1, _LPIPS.format("AlexNet")),
        Metric("lpips_vgg", "LPIPS (VGG)", "", 4, -1, _LPIPS.format("VGG-16")),
        Metric("fid", "FID", "", 2, -1, _FID),
        Metric("fvd", "FVD", "", 2, -1, _FVD),
        Metric("frechet_codec", "Fréchet distance, codec", "", 3, -1, _CODEC),
        Metric("arm_track", "Arm track error", "px", 2, -1, _TRACK),
        Metric("arm_overlap", "Arm overlap", "", 3, 1, _OVERLAP),
        Metric("temporal_error", "Temporal error", "", 3, -1, _TEMPORAL, temporal_error),
        Metric("flicker", "Flicker", "levels", 2, -1, _FLICKER, flicker),
        Metric("colour_drift", "Colour drift", "levels", 2, -1, _DRIFT, colour_drift),
    )
}
PIXEL = tuple(key for key, metric in METRICS.items() if metric.score is not None)
"""What two videos alone can be scored by."""


def score(
    pred: Videos, true: Videos, *, first_frame: bool = False, keys: Collection[str] = BASIC
) -> dict[str, PerClip]:
    """Metrics of `PIXEL` for every clip, by their keys."""
    found = {}
    for key in keys:
        scored = METRICS[key].score
        if scored is None:
            raise SimForcingError(f"metric '{key}' needs more than two videos; pixels alone give {', '.join(PIXEL)}")
        found[key] = scored(pred, true, first_frame=first_frame)
    return found


def definitions(keys: Collection[str] = BASIC) -> dict[str, str]:
    """The exact definition of each metric in one sentence, for a protocol or a page."""
    return {key: METRICS[key].definition for key in keys}


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


def scored_clips(
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
