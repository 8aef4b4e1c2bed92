"""What a person looks at to judge pairs: contact sheets, curves of motion, and the page that holds them.

Shapes: N frames, H W picture size, M = N - 1.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
from jaxtyping import Bool, Float64, UInt8
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SHEET_FRAMES = 8
PAGE_SHEETS = 40  # pictures that go into the page; all lie beside it
_TINT = np.array([255.0, 90.0, 20.0])  # the simulated arm over the real picture, in the third row of a sheet
_COLOURS = {"real": "#1f6fb4", "simulated": "#d1541a", "arm": "#8a8a8a", "commanded": "#2b8a4b"}


def sheet_picks(frames: int) -> list[int]:
    """The frames that a sheet shows: eight, spread evenly."""
    return [int(i) for i in np.linspace(0, frames - 1, min(SHEET_FRAMES, frames))]


def contact_sheet(
    real: UInt8[np.ndarray, "N H W 3"],
    sim: UInt8[np.ndarray, "N H W 3"],
    masks: Mapping[int, Bool[np.ndarray, "H W"]],
) -> UInt8[np.ndarray, "h w 3"]:
    """Frames of an episode: real, simulated, and the simulated arm tinted over the real picture.

    masks: of the frames to show, true where the simulated arm is.
    """
    picks = list(masks)
    over = [_overlay(real[i], mask) for i, mask in masks.items()]
    rows = [np.concatenate(list(row), axis=1) for row in (real[picks], sim[picks], over)]
    return np.concatenate(rows, axis=0)


def _overlay(picture: UInt8[np.ndarray, "H W 3"], mask: Bool[np.ndarray, "H W"]) -> UInt8[np.ndarray, "H W 3"]:
    mixed: Any = np.where(mask[..., None], 0.45 * picture + 0.55 * _TINT, picture)
    return np.asarray(mixed.astype(np.uint8))


def motion_chart(energies: Mapping[str, Float64[np.ndarray, " M"]]) -> UInt8[np.ndarray, "h w 3"]:
    """Curves of how much moves from frame to frame, each by its largest value."""
    figure = Figure(figsize=(11.0, 2.0), dpi=100)
    axes = figure.add_axes((0.06, 0.24, 0.80, 0.70))
    for name, energy in energies.items():
        axes.plot(energy / max(float(energy.max()), 1e-9), label=name, color=_COLOURS.get(name), linewidth=1.4)
    axes.set(xlabel="frame", ylabel="motion (of its largest)", xlim=(0, None), ylim=(0, 1.05))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return _pixels(figure)


def histograms(
    before: Float64[np.ndarray, "a D"], after: Float64[np.ndarray, "b D"], names: Sequence[str]
) -> UInt8[np.ndarray, "h w 3"]:
    """Histograms of each column, as densities, in a grid of at most seven columns."""
    columns = min(7, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(2.2 * columns, 1.9 * rows), dpi=100)
    figure.subplots_adjust(0.02, 0.24 / rows, 0.98, 1 - 0.14 / rows, wspace=0.08, hspace=0.5)
    for i, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, i + 1)
        both = np.concatenate([before[:, i], after[:, i]])
        bins = np.linspace(both.min(), max(both.max(), both.min() + 1e-6), 31)
        for values, label, colour in ((before, "before", "#8a8a8a"), (after, "after", "#d1541a")):
            density = np.histogram(values[:, i], bins, density=True)[0]
            axes.stairs(density, bins, fill=True, alpha=0.6, label=label, color=colour)
        axes.set_title(name, fontsize=9)
        axes.set_yticks([])
        axes.tick_params(labelsize=7)
    figure.legend(*axes.get_legend_handles_labels(), loc="lower right", ncols=2, frameon=False, fontsize=8)
    return _pixels(figure)


def _pixels(figure: Figure) -> UInt8[np.ndarray, "h w 3"]:
    with matplotlib.rc_context({"font.size": 9}):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return np.array(canvas.buffer_rgba())[..., :3]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
td.text, th.text { text-align: left } tr.flagged td { background: #fff1e6 } img { max-width: 100% } figure { margin: 2rem 0 }
</style></head><body><h1>{{ title }}</h1>
{% for line in lines %}<p>{{ line }}</p>
{% endfor %}<table><tr>{% for name in columns %}<th{% if loop.last %} class="text"{% endif %}>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr{% if row.flagged %} class="flagged"{% endif %}>{% for cell in row.cells %}<td{% if loop.last %} class="text"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% for name, data in pictures %}<figure><img alt="{{ name }}" src="data:image/png;base64,{{ data }}"><figcaption>{{ name }}</figcaption></figure>
{% endfor %}</body></html>
"""  # noqa: E501


def page(
    title: str,
    lines: Sequence[str],
    columns: Sequence[str],
    rows: Sequence[tuple[Sequence[Any], bool]],
    pictures: Mapping[str, Path],
) -> str:
    """One self-contained HTML page: lines of text, a table (cells; whether the row is flagged), PNG pictures."""
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_PAGE)
    return template.render(
        title=title,
        lines=lines,
        columns=columns,
        rows=[
            {"cells": ["" if cell is None else cell for cell in cells], "flagged": flagged} for cells, flagged in rows
        ],
        pictures=[
            (name, base64.b64encode(file.read_bytes()).decode()) for name, file in list(pictures.items())[:PAGE_SHEETS]
        ],
    )
