"""Plots as inline SVG that follow the page's light or dark colours.

Matplotlib draws with stand-in colours; `_to_inline` puts the page's CSS variables in their place, keeps
text as text, and drops everything that a page would have to fetch.
"""

import hashlib
import html
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from simforcing.evaluate.metrics import METRICS
from simforcing.evaluate.report.data import Curve, GuidanceCurve, HorizonCurve, Point, TrainingCurve
from simforcing.evaluate.report.wording import TRAINED_RATIO, signed, with_interval
from simforcing.evaluate.statistics import Difference, Interval

Item = TypeVar("Item")

INK, MUTED, GRID, PAPER = "#010101", "#020202", "#030303", "#030404"
SERIES = [f"#04040{i}" for i in range(1, 8)]
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--rule", PAPER: "--paper"}
VARIABLES |= {colour: f"--c{i}" for i, colour in enumerate(SERIES, 1)}
DASHES: list[tuple[int, tuple[float, ...]] | str] = ["-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2))]
MARKERS = "osD^vPX"
PATCH: Any = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
"""Behind a name, so that no line runs through it."""
MAX_POINTS = 160
"""Points a training curve is averaged down to."""
MARKED_POINTS = 25
"""Points of a training curve up to which each is marked."""

STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 2.6,
}


@dataclass(frozen=True)
class Plot:
    """An inline ``<svg>`` with its title, and the same in words for those who cannot see it."""

    title: str
    svg: str
    alt: str
    wide: bool = False


@mpl.rc_context(STYLE)
def guidance_plots(curves: Sequence[GuidanceCurve]) -> list[Plot]:
    """A plot a metric: value against guidance weight, a line a source with its 95 % band."""
    plots = []
    for key, group in _by_metric(curves, lambda curve: curve.metric):
        metric = METRICS[key]
        figure, axes = _figure()
        for i, curve in enumerate(group):
            _band(axes, i, curve.source, curve.w, curve.values)
        axes.set_xlabel("guidance weight w")
        axes.set_ylabel(_axis(metric.label, metric.unit))
        axes.set_xticks(sorted({w for curve in group for w in curve.w}))
        _legend(axes, len(group))
        said = "; ".join(f"{c.source}: {_ends(c.w, c.values, metric.digits, 'w = {:g}')}" for c in group)
        plots.append(_plot(figure, metric.label, f"Against guidance weight. {said}"))
    return plots


@mpl.rc_context(STYLE)
def curve_plots(curves: Sequence[Curve]) -> list[Plot]:
    """A plot a title: its curves with their 95 % bands, over whatever was swept."""
    plots = []
    for title in dict.fromkeys(curve.title for curve in curves):
        group = [curve for curve in curves if curve.title == title]
        figure, axes = _figure()
        for i, curve in enumerate(group):
            _band(axes, i, curve.name, curve.x, curve.values)
        label, unit, digits = _measured(group[0].metric)
        axes.set_xlabel(group[0].x_label)
        axes.set_ylabel(_axis(label, unit))
        axes.set_xticks(sorted({x for curve in group for x in curve.x}))
        axes.xaxis.set_major_formatter("{x:g}")
        _legend(axes, len(group))
        said = "; ".join(f"{c.name}: {_ends(c.x, c.values, digits, c.x_label + ' {:g}')}" for c in group)
        plots.append(_plot(figure, title, said))
    return plots


@mpl.rc_context(STYLE)
def latency_plot(points: Sequence[Point], metric: str) -> Plot:
    """Quality against latency: one point a setting, a colour a group."""
    figure, axes = _figure(wide=True, height=3.8)
    label, unit, digits = _measured(metric)
    groups = list(dict.fromkeys(point.group for point in points))
    for i, name in enumerate(groups):
        group = sorted((p for p in points if p.group == name), key=lambda p: p.seconds)
        style = _line(i, name) | {"linestyle": "none", "alpha": 0.85}
        axes.plot([p.seconds for p in group], [p.value["mean"] for p in group], **style)
    axes.set_xlabel("seconds of one clip (all stages)")
    axes.set_ylabel(_axis(label, unit))
    seconds = [point.seconds for point in points]
    if max(seconds) > 10 * min(seconds):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    _legend(axes, len(groups), columns=4)
    better = METRICS[metric].better or 1
    best = max(points, key=lambda p: better * p.value["mean"])
    fastest = min(points, key=lambda p: p.seconds)
    said = "; ".join(
        f"{word}: {p.name}, {with_interval(p.value, digits, unit)} in {p.seconds:.3g} s"
        for word, p in (("best", best), ("fastest", fastest))
    )
    return _plot(figure, f"{label} against latency", said, wide=True)


def _measured(metric: str) -> tuple[str, str, int]:
    """Label, unit and digits of a metric or of latency."""
    if metric == "latency":
        return "one clip", "seconds", 3
    return METRICS[metric].label, METRICS[metric].unit, METRICS[metric].digits


@mpl.rc_context(STYLE)
def horizon_plot(curves: Sequence[HorizonCurve]) -> Plot:
    """A metric of each frame index: how quality fades with the distance from the given frame."""
    figure, axes = _figure(wide=True)
    for i, curve in enumerate(curves):
        _band(axes, i, curve.name, range(curve.first, curve.first + len(curve.values)), curve.values)
    axes.set_xlabel("frame index (0 is given)")
    metric = METRICS[curves[0].metric]
    axes.set_ylabel(_axis(metric.label, metric.unit))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes, len(curves), columns=4)
    said = "; ".join(
        f"{c.name}: {_ends(range(c.first, c.first + len(c.values)), c.values, 1, 'frame {}')}" for c in curves
    )
    return _plot(figure, f"{metric.label} of each predicted frame", said, wide=True)


@mpl.rc_context(STYLE)
def difference_plots(differences: Sequence[Difference]) -> list[Plot]:
    """A plot a metric: each difference as a point with its 95 % interval, right of zero where a is larger."""
    plots = []
    for key, group in _by_metric(differences, lambda difference: difference["metric"]):
        metric = METRICS[key]
        names = [f"{d['a']} − {d['b']}" for d in group]
        figure, axes = _figure(height=0.7 + 0.5 * len(group))
        _dots(axes, names, group, _axis("difference", metric.unit), reference=0.0)
        said = "; ".join(f"{n}: {signed(d, metric.digits, metric.unit)}" for n, d in zip(names, group, strict=True))
        plots.append(_plot(figure, metric.label, f"Paired differences. {said}"))
    return plots


@mpl.rc_context(STYLE)
def action_ratio_plot(ratios: Mapping[str, Interval]) -> Plot:
    """Each model's action ratio with its interval; 1 means that it ignores its actions."""
    figure, axes = _figure(height=0.9 + 0.5 * len(ratios), wide=True)
    label = "error with exchanged actions / error with true actions"
    _dots(axes, list(ratios), list(ratios.values()), label, reference=1.0)
    axes.axvline(TRAINED_RATIO, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
    top = axes.get_xaxis_transform()
    for x, text, side in (
        (1.0, "1: ignores them  ", "right"),
        (TRAINED_RATIO, f" {TRAINED_RATIO}: trained", "left"),
    ):
        axes.text(x, 1.02, text, transform=top, ha=side, va="bottom", color=MUTED)
    said = "; ".join(f"{name}: {with_interval(ratio, 2)}" for name, ratio in ratios.items())
    return _plot(figure, "Action ratio by model", said, wide=True)


@mpl.rc_context(STYLE)
def training_plots(runs: Sequence[TrainingCurve]) -> list[Plot]:
    """A plot a logged key: value against step, a line a run, averaged down to `MAX_POINTS` points."""
    plots = []
    for key in dict.fromkeys(key for run in runs for key in run.values):
        figure, axes = _figure()
        having = [run for run in runs if run.values.get(key)]
        said = []
        for i, run in enumerate(having):
            steps, values = _thin(run.values[key])
            axes.plot(steps, values, **_line(i, run.name, marked=len(steps) <= MARKED_POINTS))
            said.append(f"{run.name}: {values[0]:.3g} at step {steps[0]:.0f}, {values[-1]:.3g} at {steps[-1]:.0f}")
        axes.set_xlabel("training step")
        axes.set_ylabel(key)
        _legend(axes, len(having))
        plots.append(_plot(figure, key, "; ".join(said)))
    return plots


def _by_metric(items: Iterable[Item], key: Callable[[Item], str]) -> list[tuple[str, list[Item]]]:
    """Items grouped by metric, in the order of `METRICS`."""
    order = list(METRICS)
    ordered = sorted(items, key=lambda item: order.index(key(item)))
    return [(name, list(group)) for name, group in groupby(ordered, key=key)]


def _figure(height: float = 3.3, wide: bool = False) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(11.0 if wide else 5.25, height), layout="constrained")
    figure.patch.set_visible(False)
    return figure, figure.add_subplot()


def _band(axes: Axes, i: int, name: str, x: Sequence[float], values: Sequence[Interval]) -> None:
    colour = SERIES[i % len(SERIES)]
    low, high = ([v[end] for v in values] for end in ("low", "high"))
    axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
    axes.plot(x, [v["mean"] for v in values], **_line(i, name))


def _line(i: int, name: str, marked: bool = True) -> Any:
    """Colour, dashes and marker of the i-th line: any one of them tells it from the others."""
    marker = MARKERS[i % len(MARKERS)] if marked else ""
    return {
        "color": SERIES[i % len(SERIES)],
        "linestyle": DASHES[i % len(DASHES)],
        "marker": marker,
        "label": name,
    }


def _dots(
    axes: Axes, names: Sequence[str], values: Sequence[Interval | Difference], label: str, reference: float
) -> None:
    """A line a name: the point is filled where its interval leaves the reference out, else open."""
    beside = axes.get_yaxis_transform()
    for row, (name, value) in enumerate(zip(names, values, strict=True)):
        axes.text(0, row - 0.22, name, transform=beside, va="bottom", bbox=PATCH, in_layout=False)
        clear = value["low"] > reference or value["high"] < reference
        axes.plot([value["low"], value["high"]], [row, row], color=SERIES[0], linewidth=2.2, alpha=0.55)
        face = SERIES[0] if clear else PAPER
        axes.plot(value["mean"], row, "o", color=SERIES[0], markerfacecolor=face, markersize=6)
    axes.axvline(reference, color=INK, linewidth=0.8)
    axes.set_yticks([])
    axes.set_ylim(len(names) - 0.6, -0.85)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(label)


def _legend(axes: Axes, lines: int, columns: int = 2) -> None:
    """Names above the axes, where they cannot cover a line."""
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=min(lines, columns), borderaxespad=0.2)


def _thin(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    bins = np.array_split(np.asarray(points, dtype=np.float64), min(len(points), MAX_POINTS))
    means = np.stack([b.mean(axis=0) for b in bins])
    return means[:, 0].tolist(), means[:, 1].tolist()


def _axis(label: str, unit: str) -> str:
    return f"{label} ({unit})" if unit else label


def _ends(x: Sequence[float], values: Sequence[Interval], digits: int, at: str) -> str:
    """First and last value of a curve in words."""
    first, last = (f"{with_interval(values[i], digits)} at {at.format(x[i])}" for i in (0, -1))
    return first if len(x) == 1 else f"{first}, {last}"


def _plot(figure: Figure, title: str, said: str, wide: bool = False) -> Plot:
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    alt = f"{title}. {said}."
    return Plot(title, _to_inline(buffer.getvalue(), alt), alt, wide)


def _to_inline(svg: str, alt: str) -> str:
    """An SVG file as an element of a page: themed, labelled, ids of its own, no references outwards."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.S)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    name = hashlib.sha256((svg + alt).encode()).hexdigest()[:8]
    svg = re.sub(r'\bid="', f'id="p{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\g<1>#p{name}-", svg)
    for size in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font: (\d[\d.]*)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1)
