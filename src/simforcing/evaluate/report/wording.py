"""Sentences that numbers write themselves: who beats whom, by how much, and who uses its actions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from simforcing.evaluate.metrics import METRICS
from simforcing.evaluate.statistics import Difference, Interval

TRAINED_RATIO = 1.2
"""Action ratio below which a world model has not learnt to follow its actions."""

Outcome: TypeAlias = Literal["yes", "no", "open", "neutral"]

MISSING = "–"


@dataclass(frozen=True)
class Verdict:
    """A sentence in two halves and what it amounts to: yes, no, open (these clips do not tell) or neutral."""

    outcome: Outcome
    claim: str
    evidence: str

    def __str__(self) -> str:
        """The whole sentence."""
        return f"{self.claim} {self.evidence}"


def verdict(difference: Difference) -> Verdict:
    """Whether a beats b on the difference's metric: decided only where its interval leaves zero out."""
    metric = METRICS[difference["metric"]]
    a, b = difference["a"], difference["b"]
    evidence = f"{signed(difference, metric.digits, metric.unit)} ({metric.label})"
    if math.isnan(difference["low"]):
        return Verdict("open", f"{a} against {b}: too few clips to tell:", evidence)
    above, below = difference["low"] > 0, difference["high"] < 0
    wins, loses = (above, below) if metric.better > 0 else (below, above)
    if metric.better == 0:
        word = "is sharper than" if above else "is less sharp than" if below else "is as sharp as"
        return Verdict("neutral", f"{a} {word} {b}:", evidence)
    if wins:
        return Verdict("yes", f"{a} beats {b} by", evidence)
    if loses:
        return Verdict("no", f"{a} is WORSE than {b} by", evidence)
    return Verdict("open", f"{a} does NOT beat {b}:", f"{evidence}; the interval includes zero")


@dataclass(frozen=True)
class Comparison:
    """All that was measured of one pair: the first metric's verdict, and the others' as outcome and text."""

    headline: Verdict
    others: Sequence[tuple[Outcome, str]]


def compare(differences: Sequence[Difference]) -> list[Comparison]:
    """Differences gathered by pair, pairs and metrics in the order given."""
    pairs: dict[tuple[str, str], list[Difference]] = {}
    for difference in differences:
        pairs.setdefault((difference["a"], difference["b"]), []).append(difference)
    return [
        Comparison(verdict(first), [(verdict(d).outcome, _short(d)) for d in rest]) for first, *rest in pairs.values()
    ]


def _short(difference: Difference) -> str:
    metric = METRICS[difference["metric"]]
    return f"{metric.label} {signed(difference, metric.digits, metric.unit)}"


def action_verdict(name: str, ratio: Interval) -> Verdict:
    """Whether a model follows its actions, from error with exchanged actions / error with the true ones."""
    evidence = f"action ratio {with_interval(ratio, 2)}"
    if ratio["low"] <= 1 and ratio["high"] < TRAINED_RATIO:
        return Verdict("no", f"{name} does NOT use its actions:", evidence)
    if not ratio["low"] > 1:
        return Verdict("open", f"{name} is not shown to use its actions:", evidence)
    if ratio["mean"] < TRAINED_RATIO:
        return Verdict("open", f"{name} hardly uses its actions (below {TRAINED_RATIO}):", evidence)
    return Verdict("yes", f"{name} uses its actions:", evidence)


def number(value: float, digits: int) -> str:
    """A value with ``digits`` after the point and a real minus sign; a dash for nan."""
    if math.isnan(value):
        return MISSING
    text = f"{value:.{digits}f}"
    return text.replace("-", "" if float(text) == 0 else "\N{MINUS SIGN}")


def bounds(interval: Mapping[str, float] | Interval | Difference, digits: int) -> str:
    """``[low, high]``, or nothing where there is no interval."""
    if math.isnan(interval["low"]):
        return ""
    return f"[{number(interval['low'], digits)}, {number(interval['high'], digits)}]"


def with_interval(interval: Interval | Difference, digits: int, unit: str = "") -> str:
    """``14.68 dB [14.51, 14.86]``."""
    return " ".join(part for part in (number(interval["mean"], digits), unit, bounds(interval, digits)) if part)


def signed(interval: Interval | Difference, digits: int, unit: str = "") -> str:
    """`with_interval` with a plus sign where the mean is positive: ``+0.42 dB [0.30, 0.55]``."""
    plus = "+" if float(f"{interval['mean']:.{digits}f}") > 0 else ""
    return plus + with_interval(interval, digits, unit)


def seconds(value: float) -> str:
    """Seconds with three significant digits, never as a power of ten."""
    if math.isnan(value) or value == 0:
        return MISSING if math.isnan(value) else "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return number(value, digits)
