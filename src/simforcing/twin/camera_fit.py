"""Where did the camera stand? Found from the arm's motion in the video and the joints that it had.

In rounds: silhouettes of points in tiny pictures from many starts all around the arm; the best of these in larger
and larger pictures; the best of those with exactly drawn silhouettes. Every fourth frame is held out, and says
how well the found camera predicts what moves.

Legend: T frames of an episode, n arm joints, H W picture size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int, UInt8

from simforcing.errors import SimForcingError
from simforcing.twin.camera import Camera, default_camera
from simforcing.twin.evidence import Agreement, Evidence, agreement, reduced
from simforcing.twin.robot import Robot
from simforcing.twin.search import Goal, Orbit, Vector, descend, distinct
from simforcing.twin.silhouette import ArmSurface, ExactMasks, displaced, splat

Report = Callable[[str, float, str], None]
"""Called with a stage, the share of it that is done in [0, 1], and a few words."""

_HOLD_OUT = 4  # every so many frames one is held out
_LEAST_FRAMES = 6
_LEAST_MOTION = 0.02  # metres that some part of the arm must move
_LEAST_CHANGE = 5e-4  # share of pixels that must change between two frames, on average
_PRIOR = 4e-4  # nats a pixel for each unit of `Orbit.unlikely`: decides where pictures do not
_POPULATION, _SMALL_POPULATION = 12, 8  # of a search that is wide, and one that is about to end
_DEPTH = 4.0  # how much wider it is along the distance once the rest is found
_ALIGNMENTS = 3
_FARTHEST = 5  # pixels of the exact round by which episodes are moved against each other at a time
_STEADY = 0.004  # picture widths: a camera that moves less between episodes stands still
_AMBIGUOUS = 0.03  # another camera whose score is this close (relative) is reported


@dataclass(frozen=True)
class Track:
    """One episode: its name in messages, joints and gripper opening (0 closed, 1 open) and picture of every frame."""

    where: str
    q: Float64[np.ndarray, "T n"]
    opening: Float64[np.ndarray, " T"]
    frames: UInt8[np.ndarray, "T H W 3"]

    def __post_init__(self) -> None:
        if not len(self.q) == len(self.opening) == len(self.frames):
            raise SimForcingError(f"{self.where}: {len(self.q)} poses but {len(self.frames)} pictures")


@dataclass(frozen=True)
class Effort:
    """How hard to search: in each round the picture width (pixels), the frames (of all episodes together) and the
    generations of CMA-ES. `starts` views are looked at, `tries`, `descents` and `finalists` of them go on.
    """

    starts: int = 4000
    tries: int = 36
    descents: int = 10
    finalists: int = 3
    scan_width: int = 48
    coarse_width: int = 72
    middle_width: int = 112
    exact_width: int = 160
    scan_frames: int = 12
    coarse_frames: int = 18
    middle_frames: int = 24
    frames: int = 36
    pairs_per_frame: float = 2.5
    try_generations: int = 12
    coarse_generations: int = 22
    middle_generations: int = 26
    exact_generations: int = 50


QUICK = Effort(starts=2000, tries=12, descents=5, finalists=2, middle_frames=18, frames=20, exact_generations=10)
"""For first looks."""


@dataclass(frozen=True)
class Calibration:
    """A camera, and how well it and the default guess predict the motion in held-out frames.

    score: log likelihood ratio a pixel (nats) of the fitted frames, the guess's beside it. rival: score of the best
    clearly different camera found, 0 where there is none. wander: by how many pixels at most the picture of an
    episode is displaced against the average of all, 0 for a camera that stands still (or a single episode).
    """

    camera: Camera
    held_out: Agreement
    guess_held_out: Agreement
    score: float
    guess_score: float
    rival: float
    wander: float

    @property
    def ambiguous(self) -> bool:
        """Whether a clearly different camera explains the motion nearly as well."""
        return self.rival > (1 - _AMBIGUOUS) * self.score

    def to_dict(self) -> dict[str, Any]:
        """Everything but the camera, rounded, for a report file."""

        def rounded(found: Agreement) -> dict[str, float]:
            return {"overlap": round(found.overlap, 4), "distance_pixels": round(found.distance, 3)}

        return {
            "held_out": rounded(self.held_out),
            "guess_held_out": rounded(self.guess_held_out),
            "score": round(self.score, 5),
            "guess_score": round(self.guess_score, 5),
            "rival_score": round(self.rival, 5),
            "ambiguous": self.ambiguous,
            "wander_pixels": round(self.wander, 2),
        }


@dataclass(frozen=True)
class _Sample:
    """Chosen frames of all tracks, and pairs of them within tracks."""

    q: Float64[np.ndarray, "T n"]
    opening: Float64[np.ndarray, " T"]
    frames: Sequence[UInt8[np.ndarray, "H W 3"]]
    pairs: Int[np.ndarray, "P 2"]
    track: Int[np.ndarray, " T"]  # number of the track of each frame

    def of(self, track: int) -> "_Sample":
        """The part of one track."""
        rows = np.flatnonzero(self.track == track)
        pairs = self.pairs[self.track[self.pairs[:, 0]] == track] - rows[0]
        pictures = [self.frames[i] for i in rows.tolist()]
        return _Sample(self.q[rows], self.opening[rows], pictures, pairs, self.track[rows])

    def moved(self, offsets: Float64[np.ndarray, "E 2"]) -> "_Sample":
        """The pictures of each track moved by (down, right) pixels; what comes in is as at the border."""
        from scipy.ndimage import shift

        pictures = [
            np.asarray(shift(f, (*offsets[int(t)], 0.0), order=1, mode="nearest"))
            for f, t in zip(self.frames, self.track, strict=True)
        ]
        return replace(self, frames=pictures)

    def evidence(self, height: int, width: int) -> Evidence:
        """What moved, in pictures of this size."""
        return Evidence(reduced(np.stack(self.frames), height, width), self.pairs)


def fit_camera(
    robot: Robot,
    tracks: Sequence[Track],
    *,
    fovy: float | None = None,
    effort: Effort | None = None,
    seed: int = 0,
    report: Report | None = None,
) -> Calibration:
    """One camera for all `tracks`: its pose and, unless `fovy` (degrees) is given, its field of view.

    The same tracks and seed give the same camera. Raises SimForcingError where there is nothing to go by (too few
    frames, an arm or a picture that does not move, pictures of different sizes) or no renderer.
    """
    how, tell = effort or Effort(), report or (lambda stage, share, words: None)
    height, width = _size(tracks)
    with _Search(robot, tracks, height, width, fovy, how, seed) as search:
        found = search.coarse(tell)
        found = search.middle(found, tell)
        start = max(found, key=lambda x: search.exact_score(search.orbit.camera(x)))
        start = search.align(start, len(tracks), tell)
        camera = search.exact(start, tell)
        guess = default_camera(robot, width, height)
        rivals = distinct([search.orbit.coordinates(camera), *found], 9, least=4.0)[1:]
        score, guess_score = search.exact_score(camera), search.exact_score(guess)
        rival = max((search.exact_score(search.orbit.camera(x)) for x in rivals), default=0.0)
        errors = [search.held_out(c) for c in (camera, guess)]
    return Calibration(camera, errors[0], errors[1], score, guess_score, rival, search.wander)


class _Search:
    """The rounds, on the same robot and tracks."""

    def __init__(
        self, robot: Robot, tracks: Sequence[Track], height: int, width: int, fovy: float | None, how: Effort, seed: int
    ) -> None:
        self.robot, self.how, self.seed = robot, how, seed
        self.sizes = [
            _reduced_size(height, width, w)
            for w in (how.scan_width, how.coarse_width, how.middle_width, how.exact_width)
        ]
        self.full, self.wander = (height, width), 0.0
        fit, rest = _split(tracks)
        self.fewest = _sample(fit, how.scan_frames, how.pairs_per_frame)
        self.few = _sample(fit, how.coarse_frames, how.pairs_per_frame)
        self.some = _sample(fit, how.middle_frames, how.pairs_per_frame)
        self.many = _sample(fit, how.frames, how.pairs_per_frame)
        self.unseen = _sample(rest, how.frames, how.pairs_per_frame)
        self.masks = ExactMasks(robot, *self.sizes[3])
        try:
            surface = ArmSurface(self.masks.renderer, robot.length / 20)
            self.moving = surface.moving(self.many.q, self.many.opening)
            self._check_motion(tracks)
            self.masks.show(self.moving)
            self._spacing = robot.length / 96
            surface = ArmSurface(self.masks.renderer, self._spacing, seed)
            self._points = surface.at(self.many.q, self.many.opening, self.moving)
            hand = np.mean([robot.fk(row)[:3, 3] for row in self.many.q], axis=0)
            self.orbit = Orbit(hand, height, width, fovy)
            self._exact = self.many.evidence(*self.sizes[3])
        except BaseException:
            self.masks.renderer.close()
            raise

    def __enter__(self) -> "_Search":
        return self

    def __exit__(self, *_: object) -> None:
        self.masks.renderer.close()

    def _check_motion(self, tracks: Sequence[Track]) -> None:
        where = tracks[0].where if len(tracks) == 1 else f"all {len(tracks)} episodes, such as {tracks[0].where}"
        tips = np.stack([self.robot.fk(row)[:3, 3] for row in self.many.q])
        if not self.moving or np.linalg.norm(np.ptp(tips, axis=0)) < _LEAST_MOTION:
            raise SimForcingError(
                f"{where}: the arm stands still; a camera is found from motion, choose other episodes"
            )
        if float((self.many.evidence(*self.sizes[0]).change.any > 0.5).mean()) < _LEAST_CHANGE:
            raise SimForcingError(f"{where}: nothing moves in the pictures; choose another camera or other episodes")

    def _goal(self, sample: _Sample, size: tuple[int, int]) -> Goal:
        """Minus the score of point silhouettes in pictures of `size`, plus what makes a camera unlikely."""
        pixel = 1.2 * self.robot.length / size[1]
        surface = ArmSurface(self.masks.renderer, pixel, self.seed)
        points = surface.at(sample.q, sample.opening, self.moving)
        evidence = sample.evidence(*size)

        def goal(x: Vector) -> float:
            camera = self.orbit.camera(x)
            seen = splat(points, pixel, camera, *size, sample.pairs)
            return _PRIOR * self.orbit.unlikely(camera) - evidence.score(seen.masks, seen.shifted)

        return goal

    def coarse(self, tell: Report) -> list[Vector]:
        """Many starts, the best of them improved; best first."""
        how, goal = self.how, self._goal(self.fewest, self.sizes[0])
        starts = self.orbit.starts(how.starts, self.robot.length, np.random.default_rng(self.seed))
        values = np.empty(len(starts))
        for i, x in enumerate(starts):
            values[i] = goal(x)
            if i % 100 == 0:
                tell("look around", (i + 1) / len(starts), f"{i + 1} views")
        chosen = distinct([starts[i] for i in np.argsort(values, kind="stable")], how.tries, least=2.5)
        found = self._improve(goal, chosen, 1.0, how.try_generations, lambda s, w: tell("try", s, w))
        goal = self._goal(self.few, self.sizes[1])
        chosen = distinct(found, how.descents)
        return self._improve(goal, chosen, 0.7, how.coarse_generations, lambda s, w: tell("approach", s, w))

    def middle(self, found: Sequence[Vector], tell: Report) -> list[Vector]:
        """The best distinct ones, improved in larger pictures; best first."""
        goal, how = self._goal(self.some, self.sizes[2]), self.how
        chosen = distinct(found, how.finalists)
        out = self._improve(goal, chosen, 0.4, how.middle_generations, lambda s, w: tell("compare", s, w))
        return [*self._settle(goal, out[0], tell), *out]

    def _settle(self, goal: Goal, start: Vector, tell: Report) -> list[Vector]:
        generations = 2 * self.how.middle_generations
        return self._improve(goal, [start], 0.1, generations, lambda s, w: tell("settle", s, w), _DEPTH)

    def align(self, start: Vector, tracks: int, tell: Report) -> Vector:
        """Take out how a camera that is not quite still differs from episode to episode: displace their pictures so
        that one camera suits them all, keeping their average, and improve that. Nothing where it stands still.
        """
        if tracks == 1:
            return start
        total = np.zeros((tracks, 2))
        some, many = self.some, self.many
        for _ in range(_ALIGNMENTS):
            total += self._displacement(self.orbit.camera(start), tracks)
            if np.abs(total).max() < _STEADY * self.full[1]:
                break
            self.wander = float(np.linalg.norm(total, axis=1).max())
            self.some, self.many = some.moved(-total), many.moved(-total)
            self._exact = self.many.evidence(*self.sizes[3])
            start = self._settle(self._goal(self.some, self.sizes[2]), start, tell)[0]
        return start

    def _displacement(self, camera: Camera, tracks: int) -> Float64[np.ndarray, "E 2"]:
        """By how many pixels (down, right) of the full picture each track lies off silhouettes of one camera, apart
        from what all have in common.
        """
        masks, shifted = self._drawn(camera, self.many), self._shifted(camera)
        track = self.many.track
        out = np.empty((tracks, 2))
        for i in range(tracks):
            seen, ours = self.many.of(i).evidence(*self.sizes[3]), track[self.many.pairs[:, 0]] == i
            table = np.array(
                [
                    [
                        seen.score(displaced(masks[track == i], down, right), displaced(shifted[ours], down, right))
                        for right in range(-_FARTHEST, _FARTHEST + 1)
                    ]
                    for down in range(-_FARTHEST, _FARTHEST + 1)
                ]
            )
            row, column = np.unravel_index(int(table.argmax()), table.shape)
            out[i] = _peak(table[:, column], int(row)), _peak(table[row], int(column))
        return np.asarray((out - out.mean(axis=0)) * self.full[1] / self.sizes[3][1])

    def _improve(
        self,
        goal: Goal,
        chosen: Sequence[Vector],
        width: float,
        generations: int,
        tell: Callable[[float, str], None],
        depth: float = 1.0,
    ) -> list[Vector]:
        out = []
        for i, x in enumerate(chosen):
            seed = self.seed + i
            found = descend(
                goal, x, width=width, depth=depth, generations=generations, population=_POPULATION, seed=seed
            )
            out.append(found)
            tell((i + 1) / len(chosen), f"{i + 1} of {len(chosen)}")
        return sorted(out, key=goal)

    def exact(self, start: Vector, tell: Report) -> Camera:
        """The last round, from one start."""
        how, done = self.how, 0
        shifted = self._shifted(self.orbit.camera(start))  # hardly depends on what is left to find

        def goal(x: Vector) -> float:
            nonlocal done
            done += 1
            tell("refine", min(1.0, done / (how.exact_generations * _SMALL_POPULATION)), f"{done} views")
            camera = self.orbit.camera(x)
            score = self._exact.score(self._drawn(camera, self.many), shifted)
            return _PRIOR * self.orbit.unlikely(camera) - score

        best = descend(
            goal,
            start,
            width=0.05,
            depth=_DEPTH,
            generations=how.exact_generations,
            population=_SMALL_POPULATION,
            seed=self.seed,
        )
        return self.orbit.camera(best)

    def exact_score(self, camera: Camera) -> float:
        """Score of exactly drawn silhouettes in the frames that are fitted."""
        return self._exact.score(self._drawn(camera, self.many), self._shifted(camera))

    def _shifted(self, camera: Camera) -> Bool[np.ndarray, "P H W"]:
        return splat(self._points, self._spacing, camera, *self.sizes[3], self.many.pairs).shifted

    def _drawn(self, camera: Camera, sample: _Sample) -> Bool[np.ndarray, "T H W"]:
        return self.masks.draw(camera, sample.q, sample.opening)

    def held_out(self, camera: Camera) -> Agreement:
        """Predicted against observed motion in frames that were not fitted."""
        change = self.unseen.evidence(*self.sizes[3]).change
        return agreement(change, self._drawn(camera, self.unseen), self.unseen.pairs, self.full[1])


def _peak(values: Float64[np.ndarray, " n"], top: int) -> float:
    """Place of the largest value relative to the middle, between samples by a parabola."""
    if not 0 < top < len(values) - 1:
        return top - len(values) // 2
    before, here, after = values[top - 1 : top + 2]
    bend = before - 2 * here + after
    return float(top - len(values) // 2 + (0.5 * (before - after) / bend if bend < 0 else 0.0))


def _size(tracks: Sequence[Track]) -> tuple[int, int]:
    """Height and width of the pictures."""
    if not tracks:
        raise SimForcingError("no episodes to calibrate with; give at least one")
    sizes = {track.where: track.frames.shape[1:3] for track in tracks}
    first = next(iter(sizes.values()))
    for where, size in sizes.items():
        if size != first:
            raise SimForcingError(
                f"{where}: pictures of {size[0]}x{size[1]}, others have {first[0]}x{first[1]}; calibrate them apart"
            )
    for track in tracks:
        if len(track.q) < _LEAST_FRAMES:
            raise SimForcingError(f"{track.where}: {len(track.q)} frames; a camera needs at least {_LEAST_FRAMES}")
    return int(first[0]), int(first[1])


def _reduced_size(height: int, width: int, wanted: int) -> tuple[int, int]:
    """Height and width of about the same shape, `wanted` wide, but not larger than the picture."""
    columns = min(width, wanted)
    return max(8, round(height * columns / width)), columns


def _split(tracks: Sequence[Track]) -> tuple[list[Track], list[Track]]:
    """Frames that are fitted, and those that are held out."""

    def part(track: Track, held_out: bool) -> Track:
        picked = np.arange(len(track.q))[(np.arange(len(track.q)) % _HOLD_OUT == _HOLD_OUT // 2) == held_out]
        return Track(track.where, track.q[picked], track.opening[picked], track.frames[picked])

    return [part(t, False) for t in tracks], [part(t, True) for t in tracks]


def _sample(tracks: Sequence[Track], frames: int, pairs_per_frame: float) -> _Sample:
    """About `frames` frames in all, spread over the motion, and pairs of them: half close in time, half apart."""
    share = max(4, round(frames / len(tracks)))
    random = np.random.default_rng(0)
    q, opening, pictures, pairs, owner, count = [], [], [], [], [], 0
    for number, track in enumerate(tracks):
        picked = _spread(track.q, share)
        q.append(track.q[picked])
        opening.append(track.opening[picked])
        pictures += list(track.frames[picked])
        pairs.append(count + _pairs(len(picked), round(pairs_per_frame * len(picked)), random))
        owner += [number] * len(picked)
        count += len(picked)
    return _Sample(np.concatenate(q), np.concatenate(opening), pictures, np.concatenate(pairs), np.array(owner))


def _spread(q: Float64[np.ndarray, "T n"], count: int) -> Int[np.ndarray, " t"]:
    """Up to `count` frames at even distances along the joint path; standing still adds a little too."""
    step = np.linalg.norm(np.diff(q, axis=0), axis=1)
    along = np.concatenate([[0.0], np.cumsum(step + 0.1 * step.mean() + 1e-9)])
    return np.unique(np.searchsorted(along, np.linspace(0, along[-1] * (1 - 1e-12), count)).clip(0, len(q) - 1))


def _pairs(frames: int, count: int, random: np.random.Generator) -> Int[np.ndarray, "P 2"]:
    """Different pairs of `frames` frames, half of them 1 to 3 apart and half farther, where there are so many."""
    every = np.array([(i, j) for i in range(frames) for j in range(i + 1, frames)])
    near = (every[:, 1] - every[:, 0]) <= 3
    parts = [every[near], every[~near]]
    return np.concatenate([random.permutation(part)[: -(-count // 2)] for part in parts if len(part)])
