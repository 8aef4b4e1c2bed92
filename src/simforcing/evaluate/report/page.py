"""Writes the report: one HTML file with its videos and plots inside, which opens anywhere."""

import base64
import io
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import jinja2
from jaxtyping import UInt8
from markupsafe import Markup
from PIL import Image

from simforcing.evaluate import strips
from simforcing.evaluate.metrics import METRICS
from simforcing.evaluate.report import plots, wording
from simforcing.evaluate.report.data import Clip, Grid, ReportData, Row, SweepView
from simforcing.files import write_text

STABILITY = ("arm_track", "arm_overlap", "temporal_error", "flicker", "colour_drift")
"""Metrics that stand in a table of their own."""
STRIPS = 3
"""Clips whose frames are also shown as a still strip."""
HOLD = 3
"""Times that the last frame is repeated before a video starts again."""
VIDEO_WIDTH = 1500
"""Pixels that a composite video aims at; the page shows it in a column of about 1100."""


@dataclass(frozen=True)
class Viewer:
    """A composite video ready to embed: ``data`` is a data URI, ``columns`` its labels from left to right."""

    columns: Sequence[str]
    data: str
    alt: str
    frames: int
    fps: float
    width: int
    height: int


@dataclass(frozen=True)
class Cell:
    """One cell of a sweep's table in words."""

    text: str
    bounds: str = ""
    latency: str = ""
    best: bool = False


@dataclass(frozen=True)
class Still:
    """A picture ready to embed, with what it shows in words."""

    data: str
    alt: str


def write_report(out_dir: str | Path, results: ReportData) -> Path:
    """Write ``out_dir/index.html`` and return its path; a page that is already there is replaced.

    The page holds everything: H.264 videos as data URIs, plots as inline SVG, style and a few lines of
    script. It makes no request. Parts that ``results`` lacks are left out. Beside it ``strips/`` gets the
    still strips of the first clips as PNG files. Raises `SimForcingError` where a clip's videos do not fit
    each other.
    """
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    clips = [with_error(clip) for clip in results.clips]
    stills = []
    for i, (clip, videos) in enumerate(list(zip(results.clips, clips, strict=True))[:STRIPS], start=1):
        picture = strips.strip_picture(videos)
        strips.save_png(picture, out / "strips" / f"clip-{i}.png")
        stills.append(Still(_webp(picture), f"Still frames of {clip.name}; rows: {', '.join(videos)}"))
    page = _environment().get_template("index.html.j2").render(stills=stills, **_context(results, clips))
    write_text(out / "index.html", page)
    return out / "index.html"


def with_error(clip: Clip) -> dict[str, strips.Video]:
    """The clip's videos at one length, with the heat map of |prediction - truth| where it has both."""
    videos = strips.align(clip.videos)
    if clip.truth in videos and clip.prediction in videos:
        videos[f"|{clip.prediction} − {clip.truth}|"] = strips.error_map(videos[clip.prediction], videos[clip.truth])
    return videos


def _context(results: ReportData, clips: Sequence[Mapping[str, strips.Video]]) -> dict[str, Any]:
    """Everything the template shows, ready to print."""
    horizons = dict.fromkeys(curve.metric for curve in results.horizon)
    ratios = [wording.action_verdict(name, ratio) for name, ratio in results.action_ratios.items()]
    return {
        "results": results,
        "comparisons": wording.compare(results.differences),
        "action_verdicts": ratios,
        "metrics": METRICS,
        "tables": _tables(results),
        "groups": _groups(results.rows),
        "show_w": any(row.w is not None for row in results.rows),
        "undefined": _undefined(results.rows),
        "first_columns": _used(results.with_first_frame),
        "grids": [_grid(sweep) for sweep in results.sweeps],
        "sweep_plots": [plots.curve_plots(sweep.curves) for sweep in results.sweeps],
        "latency_plots": [
            plots.latency_plot(sweep.points, sweep.points_metric) if sweep.points else None for sweep in results.sweeps
        ],
        "hero": _hero(results, clips),
        "viewers": [
            (clip.group, clip.name, _viewer([videos], results.fps, f"{clip.name}: {', '.join(videos)}"))
            for clip, videos in zip(results.clips, clips, strict=True)
        ],
        "difference_plots": plots.difference_plots(results.differences),
        "guidance_plots": plots.guidance_plots(results.guidance),
        "ratio_plot": plots.action_ratio_plot(results.action_ratios) if results.action_ratios else None,
        "horizon_plots": [plots.horizon_plot([c for c in results.horizon if c.metric == m]) for m in horizons],
        "training_plots": plots.training_plots(results.training),
        "slowest": max((t.seconds for t in results.timings), default=0.0),
        "error_ceiling": strips.ERROR_CEILING,
    }


def _used(rows: Sequence[Row]) -> list[str]:
    """Metrics that some row has, in the order of `METRICS`."""
    return [key for key in METRICS if any(key in row.metrics for row in rows)]


def _tables(results: ReportData) -> list[tuple[str, list[str]]]:
    """The columns of the table of numbers; motion and stability get one of their own where they were measured."""
    used = _used(results.rows)
    found = [
        ("", [k for k in used if k not in STABILITY]),
        ("Motion and stability", [k for k in used if k in STABILITY]),
    ]
    return [(title, columns) for title, columns in found if columns or not title]


def _grid(sweep: SweepView) -> list[tuple[Grid, list[tuple[str, list[Cell]]]]]:
    """Tables of a sweep, ready to print: value, interval and latency of each cell, the best marked."""
    found = []
    for grid in sweep.grids:
        digits = METRICS[grid.metric].digits
        lines = []
        for name, row, seconds in zip(grid.rows, grid.cells, grid.seconds, strict=True):
            cells = []
            for value, took in zip(row, seconds, strict=True):
                if value is None:
                    cells.append(Cell(wording.MISSING))
                else:
                    latency = "" if math.isnan(took) else f"{wording.seconds(took)} s"
                    text = wording.number(value["mean"], digits)
                    cells.append(Cell(text, wording.bounds(value, digits), latency, value["mean"] == grid.best))
            lines.append((name, cells))
        found.append((grid, lines))
    return found


def _hero(results: ReportData, clips: Sequence[Mapping[str, strips.Video]]) -> tuple[str, Viewer] | None:
    """The first clips under each other with their names, as far as they share sources and shapes."""
    named = list(zip(results.clips, clips, strict=True))[: results.hero_clips]
    shown = list(takewhile(lambda pair: _shapes(pair[1]) == _shapes(clips[0]), named))
    if not shown:
        return None
    title = " / ".join(clip.name for clip, _ in shown)
    return title, _viewer([videos for _, videos in shown], results.fps, f"{title}: {', '.join(clips[0])}")


def _shapes(videos: Mapping[str, strips.Video]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, video.shape) for name, video in videos.items()]


def _viewer(rows: Sequence[Mapping[str, strips.Video]], fps: float, alt: str) -> Viewer:
    first = next(iter(rows[0].values()))
    scale = max(1, min(4, round(VIDEO_WIDTH / (len(rows[0]) * first.shape[2]))))
    video = strips.hold(strips.grid(rows, scale), HOLD)
    with tempfile.TemporaryDirectory() as folder:
        data = strips.write_mp4(Path(folder) / "clip.mp4", video, fps).read_bytes()
    uri = "data:video/mp4;base64," + base64.b64encode(data).decode()
    return Viewer(list(rows[0]), uri, alt, len(first), fps, video.shape[2], video.shape[1])


def _webp(picture: UInt8[Any, "h w 3"]) -> str:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="WEBP", quality=85, method=2)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by group, groups in the order of their first row."""
    order = list(dict.fromkeys(row.group for row in rows))
    ordered = sorted(rows, key=lambda row: order.index(row.group))
    return [(name, list(group)) for name, group in groupby(ordered, key=lambda row: row.group)]


def _undefined(rows: Sequence[Row]) -> list[str]:
    """A remark a metric that is not defined on some clips."""
    remarks: dict[str, None] = {}
    for row in rows:
        for key, interval in row.metrics.items():
            missing = interval.get("missing", 0)
            if missing:
                total = missing + interval.get("clips", 0)
                remarks[f"{METRICS[key].label} is not defined on {missing} of {total} clips."] = None
    return list(remarks)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("simforcing.evaluate.report", "template"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "number": wording.number,
        "bounds": wording.bounds,
        "seconds": wording.seconds,
        "inline": Markup,
    }
    environment.filters.update(filters)
    return environment
