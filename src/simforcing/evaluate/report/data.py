"""What a report is made from: every part is optional except the title, and a part that is missing is left
out.

Shapes: T frames, H W pixels. Videos are uint8 RGB; intervals come from `evaluate.statistics`.
"""

import difflib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from simforcing.errors import SimForcingError
from simforcing.evaluate.metrics import METRICS
from simforcing.evaluate.protocol import Protocol
from simforcing.evaluate.statistics import Difference, Interval


@dataclass(frozen=True)
class Row:
    """One method's numbers: ``metrics`` maps keys of `METRICS` to intervals; rows of one ``group`` stand
    together.

        ``w`` is the guidance weight, None for a method without one.
    """

    name: str
    group: str
    metrics: Mapping[str, Interval]
    w: float | None = None


@dataclass(frozen=True)
class GuidanceCurve:
    """A metric against the guidance weight for one source of the condition, e.g. "rendered simulation"."""

    source: str
    metric: str
    w: Sequence[float]
    values: Sequence[Interval]


@dataclass(frozen=True)
class Curve:
    """One line of a plot: a metric, or seconds a clip (``metric`` = "latency"), against anything.

    Curves of one ``title`` share a plot; ``section`` is the sweep that they belong to.
    """

    section: str
    title: str
    name: str
    metric: str
    x_label: str
    x: Sequence[float]
    values: Sequence[Interval]


@dataclass(frozen=True)
class Point:
    """A setting in a plot of quality against latency; points of one ``group`` look alike."""

    name: str
    group: str
    seconds: float
    value: Interval


@dataclass(frozen=True)
class Grid:
    """A table of one metric over two settings: ``cells[row][column]`` is None where nothing was measured (yet).

    ``seconds`` has each cell's latency, nan where it was not measured.
    """

    title: str
    metric: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[Interval | None]]
    seconds: Sequence[Sequence[float]]

    @property
    def best(self) -> float | None:
        """The best mean of all cells."""
        means = [c["mean"] for row in self.cells for c in row if c is not None and not math.isnan(c["mean"])]
        return (max if METRICS[self.metric].better >= 0 else min)(means, default=None)


@dataclass(frozen=True)
class SweepView:
    """A sweep on the page: curves, tables, quality against latency, and what to know about it."""

    title: str
    notes: Sequence[str] = ()
    curves: Sequence[Curve] = ()
    grids: Sequence[Grid] = ()
    points: Sequence[Point] = ()
    points_metric: str = "psnr"


@dataclass(frozen=True)
class SensitivityRow:
    """How one method's video changes when its actions are changed; see `behaviour.Sensitivity`."""

    name: str
    change: str
    levels: Interval
    motion: Interval
    inside: Interval
    area: Interval


@dataclass(frozen=True)
class MethodRow:
    """How one method was sampled, for the protocol: model, hash of its weights, sampling in words, seeds."""

    name: str
    model: str
    sha256: str
    sampling: str
    seeds: Sequence[int]


@dataclass(frozen=True)
class HorizonCurve:
    """A metric of each frame index of one method, starting at frame ``first``."""

    name: str
    values: Sequence[Interval]
    first: int = 1
    metric: str = "psnr"


@dataclass(frozen=True)
class TrainingCurve:
    """What a run logged: for each key, its ``(step, value)`` pairs in order of steps."""

    name: str
    values: Mapping[str, Sequence[tuple[int, float]]]

    @classmethod
    def from_jsonl(cls, name: str, path: str | Path, keys: Collection[str] | None = None) -> "TrainingCurve":
        """Read JSON lines, each an object with "step" and numbers; ``keys`` chooses among them (None: all).

        A step that was logged twice (a resumed run) keeps its last value. Raises `SimForcingError` that
        names the file and line for anything that is not such an object, and for a key that no line has.
        """
        found: dict[str, dict[int, float]] = {key: {} for key in keys or ()}
        try:
            lines = Path(path).read_text().splitlines()
        except OSError as error:
            raise SimForcingError(f"{path}: cannot read the training log ({error.strerror})") from error
        for number, line in enumerate(lines, start=1):
            for key, value in _log_line(path, number, line).items():
                if keys is None or key in keys:
                    found.setdefault(key, {})[value[0]] = value[1]
        empty = [key for key, points in found.items() if not points]
        if empty:
            raise SimForcingError(f"{path}: no line has '{empty[0]}'")
        return cls(name, {key: sorted(points.items()) for key, points in found.items()})


@dataclass(frozen=True)
class Clip:
    """A held-out clip: videos by their label, in the order shown. Single frames are held still.

    Where both ``truth`` and ``prediction`` are among the labels, a heat map of their difference is
    appended. Clips of one ``group`` stand under its name.
    """

    name: str
    videos: Mapping[str, UInt8[np.ndarray, "T H W 3"]]
    truth: str = "real"
    prediction: str = "student"
    group: str = ""


@dataclass(frozen=True)
class Timing:
    """Seconds of wall-clock a clip, as measured; ``note`` says with what (steps, batch, threads)."""

    name: str
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class WhatRan:
    """The commands that made these numbers, in their order, and the seeds by what they seeded."""

    commands: Sequence[str] = ()
    seeds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ReportData:
    """Everything on a report page; see `write_report`.

    ``summary`` are sentences for the top; verdict lines are computed from ``differences`` (first: the
    headline) and ``action_ratios`` (error with exchanged actions / with the true ones, by model) and need
    no sentence. ``notes`` say in what the rows were not measured alike, ``unavailable`` why a metric is missing,
    ``with_first_frame`` repeats rows with the given frame counted. ``hero_clips`` clips play together at the top;
    ``fps`` is the clips' own rate in Hz.
    """

    title: str
    summary: Sequence[str] = ()
    rows: Sequence[Row] = ()
    differences: Sequence[Difference] = ()
    guidance: Sequence[GuidanceCurve] = ()
    action_ratios: Mapping[str, Interval] = field(default_factory=dict)
    horizon: Sequence[HorizonCurve] = ()
    training: Sequence[TrainingCurve] = ()
    clips: Sequence[Clip] = ()
    timings: Sequence[Timing] = ()
    protocol: Protocol | None = None
    what_ran: WhatRan | None = None
    caveats: Sequence[str] = ()
    notes: Sequence[str] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    with_first_frame: Sequence[Row] = ()
    sensitivity: Sequence[SensitivityRow] = ()
    sweeps: Sequence[SweepView] = ()
    methods: Sequence[MethodRow] = ()
    hero_clips: int = 2
    fps: float = 5.0

    def __post_init__(self) -> None:
        """Refuse unknown metrics and curves whose lengths do not fit, naming them."""
        for row in (*self.rows, *self.with_first_frame):
            for key in row.metrics:
                _known_metric(key, f"row '{row.name}'")
        for difference in self.differences:
            _known_metric(difference["metric"], f"difference '{difference['name']}'")
        for curve in self.guidance:
            _known_metric(curve.metric, f"guidance curve '{curve.source}'")
            if len(curve.w) != len(curve.values) or not curve.w or list(curve.w) != sorted(curve.w):
                raise SimForcingError(
                    f"guidance curve '{curve.source}': needs ascending weights with a value each, got "
                    f"{len(curve.w)} weights and {len(curve.values)} values"
                )
        for horizon in self.horizon:
            if not horizon.values:
                raise SimForcingError(f"horizon curve '{horizon.name}' has no frames")


def _known_metric(key: str, where: str) -> None:
    if key not in METRICS:
        near = difflib.get_close_matches(key, METRICS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(METRICS)}"
        raise SimForcingError(f"{where}: there is no metric '{key}'{hint}")


def _log_line(path: str | Path, number: int, line: str) -> dict[str, tuple[int, float]]:
    """Finite numbers of one log line as key -> (step, value)."""
    if not line.strip():
        return {}
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise SimForcingError(f"{path}, line {number}: not JSON ({error.msg})") from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise SimForcingError(f"{path}, line {number}: expected an object with an integer 'step'")
    step = record.pop("step")
    numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {key: (step, float(value)) for key, value in numbers.items() if np.isfinite(value)}
