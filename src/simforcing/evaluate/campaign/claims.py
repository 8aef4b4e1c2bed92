"""What is claimed, by the paper and by ourselves, and the rule by which measurements decide.

Shapes: S seeds, N clips.

A claim is one or more tests; a test compares two measured settings in one metric, clip by clip, with a 95 % interval
over seeds and, crossed with them, whole episodes. With d = a - b, and a margin where differences below it do not count:

    more      holds where the interval is above 0, does not hold where it is below 0
    less      the other way round
    same      holds where the interval is within the margin, does not hold where it is beyond it on one side
    no less   holds where the interval is above minus the margin, does not hold where it is below

and nothing is decided anywhere else, nor where something was not measured, or trained but once. A claim holds where all
its tests hold, and does not hold where one of them does not. No correction is made for their number: of twenty true
zeros one is expected to look decided.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Float64

from simforcing.evaluate.metrics import METRICS
from simforcing.evaluate.results import Result
from simforcing.evaluate.statistics import Interval, difference_over_seeds, over_seeds, paired_test

Wanted: TypeAlias = Literal["more", "less", "same", "no less"]
Outcome: TypeAlias = Literal["holds", "does not hold", "not decided", "not measured"]
Measured: TypeAlias = Mapping[str, Sequence[Result]]
"""Results by the name of their setting (`plan.reference`, or `cell`), one a seed."""

MARGIN = {"psnr": 0.1, "psnr_moving": 0.1, "ssim": 0.005}
"""Differences that do not count, where a claim says that two settings are alike."""
SHOWN = ("psnr", "psnr_moving", "ssim", "arm_track")
"""Metrics of which every comparison is shown, whichever one decides."""
NOTHING = Interval(mean=math.nan, low=math.nan, high=math.nan, clips=0, missing=0)


def cell(sweep: str, w: float, p: float | None = None, steps: tuple[int, int] = (1, 10)) -> str:
    """How claims call a setting of a sweep."""
    return f"guidance p={p:g} w={w:g}" if sweep == "guidance" else f"steps {steps[0]}+{steps[1]} w={w:g}"


@dataclass(frozen=True)
class Contrast:
    """One test: a against b. `paired`: both are of the same trainings, so their seeds are drawn together.

    metric: of `METRICS`; a distance between sets has no value a clip and is compared by its range over seeds;
        `latency`: the share of b's seconds that a saves.
    """

    a: str
    b: str
    wanted: Wanted = "more"
    metric: str = "psnr"
    paired: bool = False
    margin: float | None = None
    target: float = 0.0  # what `same` is measured from

    def outcome(self, found: Interval) -> Outcome:
        """What the interval of a - b decides."""
        low, high = found["low"] - self.target, found["high"] - self.target
        if math.isnan(found["mean"]):
            return "not measured"
        if math.isnan(low):
            return "not decided"
        margin = MARGIN.get(self.metric, 0.0) if self.margin is None else self.margin
        holds, fails = {
            "more": (low > 0, high < 0),
            "less": (high < 0, low > 0),
            "same": (low > -margin and high < margin, low > margin or high < -margin),
            "no less": (low > -margin, high < -margin),
        }[self.wanted]
        return "holds" if holds else "does not hold" if fails else "not decided"

    def once(self, measured: Measured) -> bool:
        """Whether one of both was trained but once, so that nothing is known of how trainings differ."""
        return min(len(measured.get(name, ())) for name in (self.a, self.b)) < 2

    def p(self, measured: Measured) -> float:
        """Of "a and b are the same": `paired_test` of whole episodes on the means over seeds; nan where it has none."""
        one, two = measured.get(self.a, ()), measured.get(self.b, ())
        a, b = (table(results, self.metric) if results else None for results in (one, two))
        return math.nan if a is None or b is None else paired_test(a.mean(0), b.mean(0), clusters=one[0].episodes)

    def difference(self, measured: Measured, metric: str | None = None) -> Interval:
        """a - b in a metric (default the test's own); nan where one of them lacks it."""
        key = metric or self.metric
        one, two = measured.get(self.a, ()), measured.get(self.b, ())
        if not one or not two:
            return NOTHING
        if key == "latency":
            return saved(one, two)
        a, b = table(one, key), table(two, key)
        if a is not None and b is not None:
            episodes = one[0].episodes
            if self.paired and len(a) == len(b):
                return over_seeds(a - b, clusters=episodes)
            found = difference_over_seeds(a, b, clusters=episodes)
            return Interval(
                mean=found["mean"], low=found["low"], high=found["high"], clips=found["clips"], missing=found["missing"]
            )
        if all(key in r.whole for r in (*one, *two)):
            return over_range([r.whole[key] for r in one], [r.whole[key] for r in two], len(one[0].windows))
        return NOTHING


def table(results: Sequence[Result], key: str) -> Float64[np.ndarray, "S N"] | None:
    """A metric, a row a seed; None where a seed lacks it."""
    columns = [r.per_clip.get(key) for r in results]
    return None if any(c is None for c in columns) else np.array(columns, np.float64)


def over_range(a: Sequence[float], b: Sequence[float], clips: int) -> Interval:
    """a - b of numbers of whole sets: from the least to the most that any two seeds differ; none with one seed."""
    mean = float(np.mean(a) - np.mean(b))
    few = min(len(a), len(b)) < 2
    low, high = (math.nan, math.nan) if few else (min(a) - max(b), max(a) - min(b))
    return Interval(mean=mean, low=low, high=high, clips=clips, missing=0)


def saved(a: Sequence[Result], b: Sequence[Result], n: int = 2000) -> Interval:
    """Share of b's seconds a clip that a saves; medians over measurements, which are drawn again for the interval."""
    rng = np.random.default_rng(0)

    def seconds(results: Sequence[Result]) -> tuple[float, Float64[np.ndarray, " n"]]:
        stages = {stage for r in results for stage in r.latency}
        values = [np.array([s for r in results for s in r.latency.get(stage, ())]) for stage in sorted(stages)]
        drawn = sum((np.median(rng.choice(v, (n, len(v))), axis=1) for v in values), np.zeros(n))
        return float(sum(np.median(v) for v in values)), drawn

    (mine, ours), (theirs, others) = seconds(a), seconds(b)
    if not mine or not theirs:
        return NOTHING
    low, high = np.quantile(1 - ours / others, [0.025, 0.975])
    return Interval(mean=1 - mine / theirs, low=float(low), high=float(high), clips=1, missing=0)


@dataclass(frozen=True)
class Best:
    """That one setting of a grid is the best: decided against whichever other is best by its mean."""

    claimed: str
    others: tuple[str, ...]
    metric: str = "psnr"
    paired: bool = False

    def test(self, measured: Measured) -> Contrast:
        """The claimed setting against the best of the others."""
        values = {name: table(measured[name], self.metric) for name in self.others if name in measured}
        means = {name: float(np.nanmean(v)) for name, v in values.items() if v is not None}
        rival = max(means, key=means.__getitem__, default=self.others[0])
        return Contrast(self.claimed, rival, "more", self.metric, self.paired)


@dataclass(frozen=True)
class Claim:
    """What is said, in words; `paper`: what its authors report; `tests` empty: this study cannot measure it."""

    says: str
    tests: tuple[Contrast | Best, ...] = ()
    paper: str = ""
    why: str = ""  # nothing is measured
    settled: Outcome = "not measured"  # what it then amounts to

    def judged(self, measured: Measured) -> "Judged":
        """The claim with what was measured."""
        tests = [t.test(measured) if isinstance(t, Best) else t for t in self.tests]
        found = [t.difference(measured) for t in tests]
        outcomes = [
            "not decided" if t.once(measured) and not math.isnan(d["mean"]) else t.outcome(d)
            for t, d in zip(tests, found, strict=True)
        ]
        shown = [
            {key: t.difference(measured, key) for key in SHOWN if key != t.metric and t.metric in SHOWN} for t in tests
        ]
        p = [t.p(measured) for t in tests]
        return Judged(self, tests, found, shown, p, outcomes, together(outcomes) if tests else self.settled)


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """Of a claim, from those of its tests."""
    if not outcomes or all(o == "not measured" for o in outcomes):
        return "not measured"
    if "does not hold" in outcomes:
        return "does not hold"
    return "holds" if all(o == "holds" for o in outcomes) else "not decided"


@dataclass(frozen=True)
class Judged:
    """A claim, its tests with their differences (in the deciding metric, and in others), and what it amounts to.

    p: of each test, see `Contrast.p`.
    """

    claim: Claim
    tests: Sequence[Contrast]
    found: Sequence[Interval]
    shown: Sequence[Mapping[str, Interval]]
    p: Sequence[float]
    outcomes: Sequence[Outcome]
    outcome: Outcome

    @property
    def small(self) -> bool:
        """Whether every test asks which is better, and the answer is a difference that elsewhere would not count."""
        asked = [t.wanted in ("more", "less") and t.metric in MARGIN for t in self.tests]
        sizes = [abs(d["mean"]) < MARGIN.get(t.metric, 0.0) for t, d in zip(self.tests, self.found, strict=True)]
        return bool(asked) and all(asked) and all(sizes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        tests = [
            {"a": t.a, "b": t.b, "wanted": t.wanted, "metric": t.metric, "paired": t.paired, "difference": d, "p": p,
             "also": dict(also), "outcome": o}
            for t, d, also, p, o in zip(self.tests, self.found, self.shown, self.p, self.outcomes, strict=True)
        ]  # fmt: skip
        return {"says": self.claim.says, "paper": self.claim.paper, "outcome": self.outcome, "tests": tests}


def label_of(metric: str) -> str:
    """A metric in words."""
    return "share of time saved" if metric == "latency" else METRICS[metric].label
