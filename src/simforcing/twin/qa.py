"""Does a simulated view show the motion of the real one? Overlap, lags, and pairs that cannot be right.

Pictures are compared by what moves in them. Two descriptions of a motion need no camera: how much moves in each
frame (`energy`), and how much any two moments of it differ (`unlikeness`), which a motion has in common with every
view of it. With a calibrated camera it also matters where in the picture things move.

Shapes: N frames, H W picture size, h w its cells of 4x4 pixels, K points on the arm. Lags are in frames; positive
says that the second of two motions is later.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, UInt8
from scipy.ndimage import maximum_filter

from simforcing.twin.replay import JointPath
from simforcing.twin.robot import Robot

_CELL = 4  # pixels; smaller things are noise of the camera and its compression
_NOISE = 4.0  # grey levels by which a still cell may change
_FULL = 30.0  # grey levels from which on two cells count as wholly different
_FAR = 0.15  # metres from which on two places of a point do
_LONGEST = 256  # frames compared with one another; of longer episodes every second, third, ... is taken
_ENERGY = 0.5  # weight of the energies' correlation beside that of the unlikenesses, where a lag is looked for
MOST_LAG = 8
_STILL = 0.002  # metres a frame that the arm must move at some time for its motion to be judged
_FEWEST = 12  # frames that it takes to judge


@dataclass(frozen=True)
class Motion:
    """A motion, seen or computed: energy from frame to frame, unlikeness of frames, where in the picture it was."""

    energy: Float64[np.ndarray, " M"]  # M = N - 1
    unlikeness: Float32[np.ndarray, "n n"]  # of every `stride`-th frame
    stride: int
    where: Float32[np.ndarray, "M h w"] | None = None

    def backwards(self) -> "Motion":
        """The same from its end to its start."""
        where = None if self.where is None else self.where[::-1]
        return Motion(self.energy[::-1], self.unlikeness[::-1, ::-1], self.stride, where)

    def mirrored(self) -> "Motion":
        """Seen in a mirror: left and right exchanged."""
        return replace(self, where=None if self.where is None else self.where[:, :, ::-1])


def seen(frames: UInt8[np.ndarray, "N H W 3"]) -> Motion:
    """The motion in a video."""
    cells = _cells(frames)
    where = np.maximum(np.abs(np.diff(cells, axis=0)) - _NOISE, 0.0)
    stride = _stride(len(cells))
    coarse = cells[::stride, : cells.shape[1] // 2 * 2, : cells.shape[2] // 2 * 2]
    coarse = coarse.reshape(len(coarse), coarse.shape[1] // 2, 2, -1, 2).mean(axis=(2, 4)).reshape(len(coarse), -1)
    unlike = np.stack([np.minimum(np.abs(coarse - row), _FULL).mean(axis=1) for row in coarse])
    return Motion(np.sqrt(where.mean(axis=(1, 2), dtype=np.float64)), unlike, stride, where)


def computed(points: Float64[np.ndarray, "N K 3"]) -> Motion:
    """The motion of points on the arm (`arm_points`), which no camera has seen."""
    energy = np.linalg.norm(np.diff(points, axis=0), axis=2).mean(axis=1)
    stride = _stride(len(points))
    some = points[::stride].astype(np.float32)
    unlike = np.stack([np.minimum(np.linalg.norm(some - row, axis=2), _FAR).mean(axis=1) for row in some])
    return Motion(energy, unlike, stride)


def arm_points(robot: Robot, path: JointPath) -> Float64[np.ndarray, "N K 3"]:
    """Points on every link along a joint path, in the world of the robot's model (metres)."""
    points = [robot.surface_points(q, float(o)) for q, o in zip(path.q, path.opening, strict=True)]
    return np.asarray(np.stack(points))


def _stride(frames: int) -> int:
    return max(1, -(-frames // _LONGEST))


def _cells(frames: UInt8[np.ndarray, "N H W 3"]) -> Float32[np.ndarray, "N h w"]:
    """Mean grey level of cells."""
    n, height, width = frames.shape[0], frames.shape[1] // _CELL * _CELL, frames.shape[2] // _CELL * _CELL
    out = np.empty((n, height // _CELL, width // _CELL), np.float32)
    weights = np.array([0.299, 0.587, 0.114], np.float32)
    for i, frame in enumerate(frames):  # one by one: an episode in float32 would be four times as large as it is
        grey = frame[:height, :width].astype(np.float32) @ weights
        out[i] = grey.reshape(height // _CELL, _CELL, -1, _CELL).mean(axis=(1, 3))
    return out


def agreement(a: Motion, b: Motion, lag: int = 0) -> float:
    """How alike two motions are when `b` is read `lag` steps of their stride later: correlation in [-1, 1].

    It is that of the unlikeness of all pairs of moments, less what any motion has (moments further apart differ
    more). Unrelated motions are near 0, and scatter the more the shorter they are.
    """
    n = min(len(a.unlikeness), len(b.unlikeness))
    first, second = a.unlikeness[:n, :n], b.unlikeness[:n, :n]
    if lag > 0:
        first, second = first[:-lag, :-lag], second[lag:, lag:]
    elif lag < 0:
        first, second = first[-lag:, -lag:], second[:lag, :lag]
    return _correlation(_untrended(first), _untrended(second))


def _untrended(unlike: Float32[np.ndarray, "n n"]) -> Float64[np.ndarray, " p"]:
    """Upper triangle of an unlikeness less its mean at each distance in time."""
    rows, columns = np.triu_indices(len(unlike), 2)
    values, apart = unlike[rows, columns].astype(np.float64), columns - rows
    mean = np.bincount(apart, values) / np.maximum(np.bincount(apart), 1)
    return np.asarray(values - mean[apart])


def _correlation(a: Float64[np.ndarray, " n"], b: Float64[np.ndarray, " n"]) -> float:
    if len(a) < 3:
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size > 1e-12 else 0.0


def best_lag(score: Callable[[int], float], most: int) -> tuple[float, float]:
    """The lag in -most..most with the best score, to a fraction of a frame by a parabola, and that score."""
    lags = range(-most, most + 1)
    scores = [score(lag) for lag in lags]
    best = int(np.argmax(scores))
    shift = 0.0
    if 0 < best < len(scores) - 1:
        before, at, after = scores[best - 1 : best + 2]
        bend = before - 2 * at + after
        shift = 0.5 * (before - after) / bend if bend < -1e-12 else 0.0
    return lags[best] + shift, scores[best]


def energy_agreement(a: Float64[np.ndarray, " M"], b: Float64[np.ndarray, " M"], lag: int = 0) -> float:
    """Correlation of how much moves, `b` read `lag` frames later."""
    n = min(len(a), len(b))
    first, second = (a[: n - lag], b[lag:n]) if lag >= 0 else (a[-lag:n], b[: n + lag])
    return _correlation(first, second)


def energy_lag(a: Float64[np.ndarray, " M"], b: Float64[np.ndarray, " M"]) -> float:
    """Frames by which the ups and downs of `b` come later than those of `a`; at most a third of their length."""
    return best_lag(lambda lag: energy_agreement(a, b, lag), min(MOST_LAG, len(a) // 3))[0]


def overlap(real: Motion, sim: Motion) -> float:
    """How far real and simulated motion cover each other in the picture, over all frames, in [0, 1].

    The harmonic mean of the shares of moving cells of either that have moving cells of the other within a cell's
    distance. 0 where nothing moves, or the sizes differ.
    """
    if real.where is None or sim.where is None or real.where.shape != sim.where.shape:
        return 0.0
    a, b = real.where > 0, sim.where > 0
    wide_a, wide_b = (maximum_filter(x.view(np.uint8), (1, 3, 3)).astype(bool) for x in (a, b))
    if not a.any() or not b.any():
        return 0.0
    covered, explained = float((b & wide_a).sum() / b.sum()), float((a & wide_b).sum() / a.sum())
    return 2 * covered * explained / max(covered + explained, 1e-9)


def alike_in_place(real: Motion, sim: Motion) -> float:
    """Correlation of where in the picture, and when, things move; 0 where that is not known."""
    if real.where is None or sim.where is None or real.where.shape != sim.where.shape:
        return 0.0
    a, b = (np.sqrt(m.where.astype(np.float64)) for m in (real, sim))  # type: ignore[union-attr]
    return _correlation((a - a.mean(axis=0)).ravel(), (b - b.mean(axis=0)).ravel())


def sideways(real: Motion, sim: Motion) -> float:
    """Correlation of left and right: of the columns in which real and simulated things move, in [-1, 1]."""
    if real.where is None or sim.where is None:
        return 0.0
    columns, weights = [], np.ones(len(real.energy))
    for motion in (real, sim):
        assert motion.where is not None
        profile = motion.where.sum(axis=1, dtype=np.float64)
        total = profile.sum(axis=1)
        columns.append(profile @ np.linspace(0.0, 1.0, profile.shape[1]) / np.maximum(total, 1e-9))
        weights = np.minimum(weights, motion.energy / max(float(motion.energy.max()), 1e-9))
    if weights.sum() < 3:
        return 0.0
    a, b = (np.sqrt(weights) * (c - np.average(c, weights=weights)) for c in columns)
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size > 1e-12 else 0.0


@dataclass(frozen=True)
class Thresholds:
    """From when on a pair is flagged. Agreements are correlations; set on real Franka and simulated WidowX episodes.

    related: least agreement of a pair, `unseen` of one whose guessed camera hardly sees the arm move. plain:
    agreement that another reading of a pair must reach, and `better` by how much it must beat the pair as it is. lag:
    frames that the real motion may be early or late, `gain` what a lag must add. placed, in_place: least `overlap` and
    `alike_in_place` under a calibrated camera. opposite: `sideways` of a mirrored pair.
    """

    related: float = 0.25
    unseen: float = 0.1
    plain: float = 0.35
    better: float = 0.15
    lag: float = 1.5
    gain: float = 0.08
    placed: float = 0.15
    in_place: float = 0.05
    opposite: float = -0.65


@dataclass(frozen=True)
class Check:
    """What was found about one pair; see `examine`. `flags` are short names, `reasons` a sentence for each."""

    agreement: float
    lag_sim_real: float
    lag_action_sim: float | None
    motion_overlap: float | None
    flags: tuple[str, ...]
    reasons: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, lags in frames; the lag from action to real motion is the sum of the other two."""
        action = self.lag_action_sim
        return {
            "motion_agreement": round(self.agreement, 3),
            "motion_overlap": None if self.motion_overlap is None else round(self.motion_overlap, 3),
            "lag_action_sim": None if action is None else round(action, 2),
            "lag_sim_real": round(self.lag_sim_real, 2),
            "lag_action_real": None if action is None else round(action + self.lag_sim_real, 2),
            "flags": list(self.flags),
            "reasons": list(self.reasons),
        }


def examine(
    real: Motion,
    sim: Motion,
    arm: Motion | None = None,
    *,
    action_energy: Float64[np.ndarray, " M"] | None = None,
    calibrated: bool,
    thresholds: Thresholds = Thresholds(),
) -> Check:
    """Whether the simulated view can belong to the real one.

    arm: motion of the arm that was drawn (`computed`), which also counts where a guessed camera does not see it.
    action_energy: how much the action commands to move from frame to frame. Flags: `still` (too short or too little
    motion to judge; then no other), `unrelated` (another episode's simulation), `reversed`, `shifted`, `mirrored`,
    and `misplaced` (under a calibrated camera the motions hardly overlap). Without calibration `mirrored` means
    that the two clearly move to opposite sides, as they also do when the guessed camera stands on the other side.
    """
    t = thresholds
    views = [view for view in (sim, arm) if view is not None]
    own = max(agreement(real, view) for view in views)
    back = max(agreement(real, view.backwards()) for view in views)
    lag, gain, there = _lag(real, views, t.gain)
    found: list[tuple[str, str]] = []
    moving = arm.energy.max() > _STILL if arm is not None else sim.energy.max() > 0
    if len(real.energy) + 1 < _FEWEST or not moving or real.energy.max() == 0:
        found.append(("still", "too short or too little motion to judge"))
    elif back > own + t.better and back > t.plain:
        found.append(("reversed", f"agrees better backwards in time ({back:.2f}) than forwards ({own:.2f})"))
    elif abs(lag) > t.lag and gain > t.gain and there > t.plain:
        found.append(("shifted", f"real motion is {lag:+.1f} frames later (agreement {there:.2f}, else {own:.2f})"))
    elif own < (t.related if calibrated or _sees(sim) else t.unseen):
        found.append(("unrelated", f"no common motion (agreement {own:.2f}); another episode's simulation?"))
    if not found:
        found += _placed(real, sim, calibrated, t)
    action_lag = None if action_energy is None else energy_lag(action_energy, (arm or sim).energy)
    return Check(
        agreement=own,
        lag_sim_real=lag,
        lag_action_sim=action_lag,
        motion_overlap=overlap(real, sim) if calibrated else None,
        flags=tuple(name for name, _ in found),
        reasons=tuple(reason for _, reason in found),
    )


def _sees(sim: Motion) -> bool:
    """Whether the simulated view shows motion in at least a third of the frames."""
    return bool(np.mean(sim.energy > 0.1) > 1 / 3)


def _lag(real: Motion, views: Sequence[Motion], gain: float) -> tuple[float, float, float]:
    """Frames by which the real motion is later, what that gains over no lag, and the agreement there.

    A lag that gains less than `gain` is looked for within a frame only: slow motion looks alike at many.
    """

    def score(lag: int) -> float:
        frames = lag * real.stride
        return max(
            agreement(real, view, -lag) + _ENERGY * energy_agreement(real.energy, view.energy, -frames)
            for view in views
        )

    lag, best = best_lag(score, min(MOST_LAG, (len(real.unlikeness) - 1) // 3))
    if best - score(0) <= gain:
        lag, best = best_lag(score, 1)
        lag = min(max(lag, -1.0), 1.0)
    there = max(agreement(real, view, -round(lag)) for view in views)
    return lag * real.stride, best - score(0), there


def _placed(real: Motion, sim: Motion, calibrated: bool, t: Thresholds) -> list[tuple[str, str]]:
    """Flags about where in the picture the motion is."""
    if not calibrated:
        side = sideways(real, sim)
        if side < t.opposite:
            return [("mirrored", f"moves to the other side (correlation {side:.2f}); mirrored, or so is the camera")]
        return []
    straight, mirrored = alike_in_place(real, sim), alike_in_place(real, sim.mirrored())
    if mirrored > straight + t.better / 2:
        return [("mirrored", f"fits better in a mirror ({mirrored:.2f}) than as it is ({straight:.2f})")]
    covered = overlap(real, sim)
    if covered < t.placed or straight < t.in_place:
        return [("misplaced", f"motions overlap by {covered:.2f} and agree in place by {straight:.2f} only; camera?")]
    return []
