"""What a world model does, beyond single frames: does it follow its actions, is the arm where it should be.

Legend: N clips, T frames, H W pixels, A action steps, a action numbers, S predicted frames. Videos are uint8 RGB,
``N T H W 3``. Everything is a number a clip; nan where it is not defined.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, UInt8

from simforcing.data.episode import ActionConvention
from simforcing.errors import SimForcingError
from simforcing.evaluate.metrics import MOVING_MINIMUM, PerClip, Videos, moving_mask, scored_clips

Masks: TypeAlias = Bool[np.ndarray, "N T H W"]
Actions: TypeAlias = Float32[np.ndarray, "N A a"]

ARM_THRESHOLD = 24
"""Grey levels of 255 by which a channel must differ from the background for its pixel to be the arm's."""
ARM_MINIMUM = 12
"""Pixels below which a frame shows no arm."""
ARM_MAXIMUM = 0.5
"""Share of a frame above which a mask is no arm: the camera moved, or the background was not found."""
NEAR = 0.05
"""Share of the frame's height within which an arm in the wrong place is still looked for around the twin's."""
CHANGES = ("zero", "negated", "shuffled", "other")


def changed_actions(
    action: Actions, convention: ActionConvention, others: Int64[np.ndarray, " N"], seed: int = 0
) -> dict[str, Actions]:
    """The actions of `CHANGES`, by name; the last number (the gripper) stays, except in `shuffled` and `other`.

    zero: the arm is told to stay. A delta becomes 0; an absolute pose stays that of the first step.
    negated: the opposite way. A delta changes its sign (with quaternions: of the positions, rotations are none);
        absolute positions are mirrored at the first step's, rotations stay.
    shuffled: the same steps in another order (deltas end near where they should; absolute poses are all visited).
    other: those of another episode's clip.
    """
    if action.shape[2] < 7:
        raise SimForcingError(
            f"actions of {action.shape[2]} numbers are no poses (xyz, rotation, gripper); leave sensitivity out"
        )
    zero, negated = action.copy(), action.copy()
    if convention.kind == "absolute":
        zero[..., :-1] = action[:, :1, :-1]
        negated[..., :3] = 2 * action[:, :1, :3] - action[..., :3]
    else:
        zero[..., :-1] = 0
        negated[..., :-1] = -action[..., :-1]
        if convention.rotation == "quaternion":
            for changed in (zero, negated):
                changed[..., 3:-1] = (0, 0, 0, 1)
    rng = np.random.default_rng(seed)
    shuffled = np.stack([clip[rng.permutation(len(clip))] for clip in action])
    return {"zero": zero, "negated": negated, "shuffled": shuffled, "other": action[others]}


@dataclass(frozen=True)
class Sensitivity:
    """How a changed action changes the video: each number a clip.

    change: mean absolute difference to the video under the true actions, in grey levels of 255, predicted frames.
    motion: mean absolute departure from the first frame within the places, relative to that under the true actions:
        small where the arm was told to stay and does (blur and sampling noise keep it above 0).
    inside: share of the squared difference that lies where the arm is or should be (`places`).
    area: share of the pixels that these places are; a model that changes anything anywhere has inside = area.
    """

    change: PerClip
    motion: PerClip
    inside: PerClip
    area: PerClip

    def to_dict(self) -> dict[str, list[float]]:
        """Plain values."""
        return {key: [float(v) for v in getattr(self, key)] for key in ("change", "motion", "inside", "area")}


def places(true: Videos, others: Int64[np.ndarray, " N"]) -> dict[str, Masks]:
    """Where a change of actions may change the video, by name, dilated by one pixel.

    zero, shuffled: pixels that move at any time in the true clip; other: in the true clip or in the other one; negated:
    in any clip, for the arm goes where nobody filmed it.
    """
    swept = moving_mask(true).any(1, keepdims=True)
    frames = np.ones((1, true.shape[1], 1, 1), dtype=bool)
    own = swept & frames
    return {
        "zero": own,
        "shuffled": own,
        "other": own | own[others],
        "negated": np.broadcast_to(own.any((0, 1)), own.shape),
    }


def sensitivity(changed: Videos, usual: Videos, place: Masks) -> Sensitivity:
    """Compares the videos under changed and under true actions; both start from the same frame and noise."""
    rows = []
    for (c, u), mask in zip(scored_clips(changed, usual, True), place, strict=True):
        gap = np.abs(c[1:].astype(np.float64) - u[1:])
        departure, usually = (np.abs(v[1:].astype(np.float64) - v[:1])[mask[1:]].sum() for v in (c, u))
        energy = np.square(gap).sum(-1)
        total = energy.sum()
        rows.append(
            (
                gap.mean(),
                departure / usually if usually > 0 else np.nan,
                energy[mask[1:]].sum() / total if total > 0 else np.nan,
                mask[1:].mean(),
            )
        )
    return Sensitivity(*(np.array(column) for column in zip(*rows, strict=True)))


def arm_masks(sim: Videos) -> Masks:
    """Where the twin's arm is, from its rendered view (arm only, camera at rest).

    The background is the median of every pixel over all frames of all clips; the arm differs from it by more than
    `ARM_THRESHOLD` levels in a channel. What hardly moves, such as the arm's base, is background and says nothing about
    motion either. Give clips of several episodes, or the median still shows the arm. A frame of which more than
    `ARM_MAXIMUM` differ has an empty mask.
    """
    background = np.median(sim.reshape(-1, *sim.shape[2:]), axis=0)
    masks: Masks = np.stack([(np.abs(clip - background) > ARM_THRESHOLD).any(-1) for clip in sim.astype(np.int16)])
    masks &= masks.mean((2, 3), keepdims=True) <= ARM_MAXIMUM
    return masks


@dataclass(frozen=True)
class Motion:
    """How well the arm's motion is predicted, a number a clip.

    track: mean distance of the arm's centroid from the true one, in pixels.
    overlap: mean intersection over union of the arm's pixels with the true ones.
    """

    track: PerClip
    overlap: PerClip


def motion_accuracy(pred: Videos, true: Videos, arm: Masks) -> Motion:
    """Arm-mask track error and overlap on the predicted frames, from the twin's masks.

    Predicted and true arm are found by one rule: pixels that differ by more than `ARM_THRESHOLD` levels in a channel
    from the clip's background, within `NEAR` of where the twin's arm ever is in the clip. Background: mean of the true
    clip's frames in which the twin's arm (dilated by one pixel) leaves the pixel free; pixels never left free are not
    looked at. Shadows and moved objects there count for both. A prediction that shows no arm keeps the centroid that it
    showed last (at first the given frame's), and overlaps by 0. nan where the true arm is seen in less than half of the
    frames.
    """
    rows = [_motion(p, t, m) for (p, t), m in zip(scored_clips(pred, true, True), arm, strict=True)]
    return Motion(*(np.array(column) for column in zip(*rows, strict=True)))


def _motion(
    pred: UInt8[np.ndarray, "T H W 3"], true: UInt8[np.ndarray, "T H W 3"], arm: Bool[np.ndarray, "T H W"]
) -> tuple[float, float]:
    free = ~_grown(arm, 1)
    count = free.sum(0)
    background = (true * free[..., None]).sum(0, dtype=np.float64) / np.maximum(count, 1)[..., None]
    ever: Bool[np.ndarray, "1 H W"] = np.logical_or.reduce(arm)[None]
    region = (count > 0) & _grown(ever, max(1, round(NEAR * arm.shape[1])))[0]
    found, wanted = (((np.abs(v - background) > ARM_THRESHOLD).any(-1) & region) for v in (pred, true))
    seen = wanted.sum((1, 2)) >= ARM_MINIMUM
    if region.sum() < MOVING_MINIMUM or not seen[0] or seen[1:].sum() < len(seen[1:]) / 2:
        return float("nan"), float("nan")
    last, distances, overlaps = _centroid(wanted[0]), [], []
    for t in range(1, len(true)):
        there = found[t].sum() >= ARM_MINIMUM
        last = _centroid(found[t]) if there else last
        if seen[t]:
            distances.append(float(np.hypot(*(last - _centroid(wanted[t])))))
            either = (found[t] | wanted[t]).sum()
            overlaps.append(float((found[t] & wanted[t]).sum() / either) if there else 0.0)
    return float(np.mean(distances)), float(np.mean(overlaps))


def _centroid(mask: Bool[np.ndarray, "H W"]) -> Float64[np.ndarray, "2"]:
    centre: Float64[np.ndarray, "2"] = np.argwhere(mask).mean(0)
    return centre


def _grown(masks: Bool[np.ndarray, "T H W"], by: int) -> Bool[np.ndarray, "T H W"]:
    """Dilated by a square of 2 `by` + 1 pixels."""
    for axis in (1, 2):
        padded = np.pad(masks, [(by, by) if i == axis else (0, 0) for i in range(3)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * by + 1, axis=axis)
        masks = np.logical_or.reduce(windows, axis=-1)
    return masks
