"""From a folder of results to what its page shows.

Legend: N clips, T frames, H W pixels.
"""

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from simforcing.errors import SimForcingError
from simforcing.evaluate.gallery import load_video
from simforcing.evaluate.metrics import METRICS
from simforcing.evaluate.protocol import Protocol
from simforcing.evaluate.report.data import (
    Clip,
    Curve,
    Grid,
    HorizonCurve,
    MethodRow,
    Point,
    ReportData,
    Row,
    SensitivityRow,
    SweepView,
    Timing,
    TrainingCurve,
)
from simforcing.evaluate.results import Comparison, Result, is_result
from simforcing.evaluate.statistics import Interval, over_seeds
from simforcing.evaluate.sweep import CELLS, STAGES, Outcome, Sweep

SHOWN = ("psnr", "psnr_moving", "ssim", "lpips_alex", "fvd", "fid", "frechet_codec")
"""Metrics of a sweep's curves and tables."""
LOGGED = ("total", "val_action_ratio")
"""Keys of a training log that are drawn."""
PER_GROUP = 2
"""Clips of each group: worst, best, in between."""
OTHERS = 2
"""Methods shown beside the one that the page is about."""
LARGEST = 50_000_000
"""Bytes of a file that may be a result."""


@dataclass(frozen=True)
class Found:
    """What lies in a folder, and directly in its folders."""

    results: list[tuple[Path, Result]]
    sweeps: list[Path]
    logs: list[Path]


def find(directory: Path) -> Found:
    """Result files, sweeps and training logs, in the order of their names.

    Raises:
        SimForcingError: there is no such folder, or nothing to report in it.
    """
    if not directory.is_dir():
        raise SimForcingError(f"{directory}: no such folder; give one with result files or sweeps")
    inside = sorted(p for p in directory.iterdir() if p.is_dir())
    places = [directory, *(p for p in inside if not (p.name == CELLS and (directory / "sweep.json").exists()))]
    for path in (f for place in places for f in sorted(place.iterdir()) if f.suffix in (".json", ".jsonl")):
        if not path.exists():
            raise SimForcingError(f"{path}: a link that leads nowhere; delete it, or put its target back")
    files = [f for place in places for f in sorted(place.glob("*.json")) if f.stat().st_size < LARGEST]
    results = [(f, Result.load(f)) for f in files if f.name != "sweep.json" and _is_result(f)]
    sweeps = [place for place in places if (place / "sweep.json").is_file()]
    logs = [place / "log.jsonl" for place in places if (place / "log.jsonl").is_file()]
    if not results and not sweeps:
        raise SimForcingError(
            f"{directory}: no results and no sweeps; write some with 'simforcing evaluate --out {directory}/NAME.json' "
            f"or 'simforcing sweep ... --out {directory}/NAME'"
        )
    return Found(results, sweeps, logs)


def collect(directory: Path, allow: Collection[str] = (), ours: str | None = None, title: str = "") -> ReportData:
    """Everything of the folder on one page.

    allow: fields of the protocol in which results may differ; the page then says that they do.
    ours: the method that the page is about; default the first by name that is no control.

    Raises:
        SimForcingError: nothing to report, results of different protocols, or no method of that name.
    """
    found = find(directory)
    shown = ReportData(
        title=title or f"SimForcing: {directory.resolve().name}",
        sweeps=[sweep_view(Sweep.load(path, allow), path.name) for path in found.sweeps],
        training=[_training(log) for log in found.logs],
        caveats=_caveats(found),
    )
    if not found.results:
        first = next((r for path in found.sweeps for r in Sweep.load(path, allow).results), None)
        fields = {**vars(shown), "protocol": first.protocol if first else None}
        return ReportData(**fields)
    comparison = Comparison.of([r for _, r in found.results], allow)
    name = _chosen(comparison, ours)
    return ReportData(**{**vars(shown), **_methods(comparison, name), "clips": _clips(found, comparison, name)})


def _chosen(comparison: Comparison, ours: str | None) -> str:
    if ours is not None and ours not in comparison.methods:
        raise SimForcingError(f"no result is named '{ours}'; there are {', '.join(comparison.methods)}")
    names = [n for n, group in comparison.methods.items() if not group[0].protocol.control]
    return ours or next(iter(names or comparison.methods))


def _methods(comparison: Comparison, ours: str) -> dict[str, object]:
    """The parts of the page that come from result files."""
    firsts = {name: group[0] for name, group in comparison.methods.items()}
    protocol = firsts[ours].protocol
    order = [ours, *(n for n in firsts if n != ours)]
    rows, first_frame = comparison.rows(), comparison.rows_with_first_frame()
    seeds = max(len(group) for group in comparison.methods.values())
    controls = {n for n in order if firsts[n].protocol.control}
    groups = {n: "" if not controls else "Controls" if n in controls else "Methods" for n in order}
    return {
        "summary": [
            f"{protocol.clips} held-out clips of {len(set(comparison.episodes))} episodes, predicted frames only. This "
            f"page is about '{ours}'; intervals are over whole episodes"
            + (f" and {seeds} seeds." if seeds > 1 else ", for one seed of training and noise.")
        ],
        "rows": [Row(n, groups[n], rows[n], firsts[n].protocol.guidance) for n in order],
        "with_first_frame": [Row(n, "", first_frame[n]) for n in order if n in first_frame],
        "differences": comparison.differences(ours),
        "action_ratios": comparison.action_ratios(),
        "sensitivity": [row for n in order for row in _sensitivity(comparison, n)],
        "horizon": [
            HorizonCurve(n, values, metric=key)
            for key in ("psnr", "colour_drift")
            for n in order
            if (values := comparison.frames(n, key)) is not None
        ],
        "timings": [t for n in order for t in _timings(n, comparison.methods[n])],
        "protocol": protocol,
        "methods": [_method(n, comparison.methods[n]) for n in order],
        "notes": comparison.notes,
        "unavailable": comparison.unavailable(),
        "fps": protocol.fps,
    }


def sampling(protocol: Protocol) -> str:
    """How a method was sampled, in words."""
    if protocol.control in ("copy", "codec"):
        return {"copy": "copy of the first frame", "codec": "the codec's reconstruction of the truth"}[protocol.control]
    parts = [f"w = {protocol.guidance:g}", f"{protocol.real_steps} steps"]
    if protocol.simulation:
        steps = "" if protocol.sim_steps is None else f", {protocol.sim_steps} steps"
        parts.append(f"simulation {protocol.simulation}{steps}")
    if protocol.guidance_kind != "branches":
        parts.append(f"guidance {protocol.guidance_kind}")
    return ", ".join([*parts, *([protocol.control.replace("-", " ")] if protocol.control else [])])


def _method(name: str, group: Sequence[Result]) -> MethodRow:
    first = group[0]
    hashes = ", ".join(dict.fromkeys(r.model_sha256[:16] for r in group))
    models = ", ".join(dict.fromkeys(r.model for r in group))
    return MethodRow(name, models, hashes, sampling(first.protocol), [r.protocol.seed for r in group])


def _sensitivity(comparison: Comparison, name: str) -> list[SensitivityRow]:
    group = comparison.methods[name]
    found = []
    for change in group[0].sensitivity:
        if all(change in r.sensitivity for r in group):
            values: list[Interval] = [
                over_seeds(np.array([r.sensitivity[change][key] for r in group]), clusters=comparison.episodes)
                for key in ("change", "motion", "inside", "area")
            ]
            found.append(SensitivityRow(name, change, *values))
    return found


def _timings(name: str, group: Sequence[Result]) -> list[Timing]:
    """Median of every stage, one clip at a time."""
    machine = group[0].protocol.machine
    with_what = f"{machine.get('gpu', machine.get('cpu', ''))}, {machine.get('torch_threads', '?')} threads"
    found = []
    for stage in STAGES:
        taken = [s for r in group for s in r.latency.get(stage, ())]
        if taken:
            note = f"one clip at a time, median of {len(taken)}; {with_what}"
            found.append(Timing(f"{name}: {stage}", float(np.median(taken)), note))
    return found


def _clips(found: Found, comparison: Comparison, ours: str) -> list[Clip]:
    """Worst, best and middle clips of the method by PSNR on moving pixels, beside others and the simulation."""
    folders: dict[str, tuple[Path, Result]] = {}
    for path, result in found.results:
        if result.videos and (path.parent / result.videos).is_dir():
            folders.setdefault(result.name, (path.parent / result.videos, result))
    if ours not in folders:
        return []
    folder, result = folders[ours]
    others = [n for n in comparison.methods if n != ours and n in folders and not folders[n][1].protocol.control]
    scores = np.array(result.per_clip["psnr_moving"])
    if np.isnan(scores).all():
        scores = np.array(result.per_clip["psnr"])
    order = [int(i) for i in np.argsort(scores) if not math.isnan(scores[i])]
    middle = len(order) // 2
    groups = {
        f"Worst clips of '{ours}'": order[:PER_GROUP],
        f"Best clips of '{ours}'": order[::-1][:PER_GROUP],
        "In between": order[middle : middle + PER_GROUP],
    }
    clips, seen = [], set[int]()
    for group, chosen in groups.items():
        for i in (i for i in chosen if i not in seen):
            seen.add(i)
            videos = _views(i, folder, result, {n: folders[n] for n in others[:OTHERS]}, ours)
            if videos:
                episode, start = result.windows[i]
                text = f"episode {episode}, row {start}, {scores[i]:.2f} dB: {result.tasks[i]}"
                clips.append(Clip(text, videos, prediction=ours, group=group))
    return clips


def _views(
    i: int, folder: Path, result: Result, others: dict[str, tuple[Path, Result]], ours: str
) -> dict[str, UInt8[np.ndarray, "T H W 3"]]:
    """Videos of one clip by their label; empty without truth or prediction."""
    p, window = result.protocol, result.windows[i]

    def load(where: Path, view: str) -> np.ndarray | None:
        video = load_video(where, window, view, p.frames, p.fps)
        return None if video is None else video[:, : p.height, : p.width]

    wanted = {"real": load(folder, "real"), ours: load(folder, "predicted")}
    if any(v is None for v in wanted.values()):
        return {}
    wanted |= {name: load(where, "predicted") for name, (where, _) in others.items()}
    simulation = load(folder, "simulation")
    wanted["simulation" if simulation is not None else "rendered simulation"] = (
        simulation if simulation is not None else load(folder, "rendered")
    )
    return {name: video for name, video in wanted.items() if video is not None}


def sweep_view(sweep: Sweep, name: str) -> SweepView:
    """Curves, tables and the quality-latency plane of a sweep."""
    kinds = {"guidance": "Guidance weight and retention", "steps": "Sampling steps, guidance weight and latency"}
    keys = [k for k in SHOWN if any(k in o.metrics for o in sweep.outcomes)]
    runs = max((o.runs for o in sweep.outcomes), default=0)
    notes = [
        *sweep.notes,
        f"{len(sweep.outcomes)} of {sweep.total} settings measured, {runs} run{'s' if runs != 1 else ''} each"
        f" ({', '.join(sweep.about.get('checkpoints', []))}; simulation {sweep.about.get('simulation', '')}; "
        f"part '{sweep.about.get('part', '')}').",
    ]
    if any(o.taken for o in sweep.outcomes):
        notes.append(
            "Latency: one clip at a time, all stages that the setting needs, median of its measurements; bands go from "
            "the fastest to the slowest."
        )
    metric = "psnr_moving" if "psnr_moving" in keys else (keys or ["psnr"])[0]
    timed = [o for o in sweep.outcomes if not math.isnan(o.latency) and metric in o.metrics]
    curves = _guidance_curves(sweep, keys) if sweep.kind == "guidance" else _steps_curves(sweep, keys, metric)
    return SweepView(
        title=f"{kinds[sweep.kind]} ({name})",
        notes=notes,
        curves=curves,
        grids=[_table(sweep, key) for key in keys],
        points=[Point(str(o.setting), f"w = {o.setting.w:g}", o.latency, o.metrics[metric]) for o in timed],
        points_metric=metric,
    )


def _guidance_curves(sweep: Sweep, keys: Sequence[str]) -> list[Curve]:
    """Against w, a line a retention; and the other way round."""
    found = []
    for key in (*keys, "latency"):
        label = "Latency" if key == "latency" else METRICS[key].label
        for p, group in _grouped(sweep, lambda o: o.setting.retention):
            found.append(_curve(f"{label} against w", f"p = {p:g}", key, "guidance weight w", group, "w"))
        if key != "latency":
            for w, group in _grouped(sweep, lambda o: o.setting.w):
                found.append(_curve(f"{label} against p", f"w = {w:g}", key, "retention p", group, "retention"))
    return [c for c in found if c.x]


def _steps_curves(sweep: Sweep, keys: Sequence[str], metric: str) -> list[Curve]:
    """Against steps and w around the best setting, and the latency of each stage."""
    best = sweep.best(metric)
    if best is None:
        return []
    s = best.setting
    found = []
    for key in (*keys, "latency"):
        label = "Latency" if key == "latency" else METRICS[key].label
        for w, group in _grouped(sweep, lambda o: o.setting.w):
            at = [o for o in group if o.setting.sim_steps == s.sim_steps]
            title = f"{label} against real steps (simulation steps: {s.sim_steps})"
            found.append(_curve(title, f"w = {w:g}", key, "steps of the real stage", at, "real_steps"))
            at = [o for o in group if o.setting.real_steps == s.real_steps]
            title = f"{label} against simulation steps (real steps: {s.real_steps})"
            found.append(_curve(title, f"w = {w:g}", key, "steps of the simulation stage", at, "sim_steps"))
    at = [o for o in sweep.outcomes if o.setting.w == s.w and o.setting.sim_steps == s.sim_steps]
    for stage in STAGES:
        timed = sorted((o for o in at if stage in o.taken), key=lambda o: o.setting.real_steps)
        x, values = [o.setting.real_steps for o in timed], [o.range(stage) for o in timed]
        found.append(
            Curve("", f"Latency by stage, w = {s.w:g}", stage, "latency", "steps of the real stage", x, values)
        )
    return [c for c in found if c.x]


def _grouped(sweep: Sweep, key: Callable[[Outcome], float | None]) -> list[tuple[float, list[Outcome]]]:
    values = sorted({v for o in sweep.outcomes if (v := key(o)) is not None})
    return [(v, [o for o in sweep.outcomes if key(o) == v]) for v in values]


def _curve(title: str, name: str, metric: str, x_label: str, group: Sequence[Outcome], along: str) -> Curve:
    """One line through the outcomes that have the metric, in the order of a field of their setting."""

    def value(o: Outcome) -> Interval | None:
        if metric == "latency":
            return None if math.isnan(o.latency) else o.range()
        return o.metrics.get(metric)

    points = sorted((float(getattr(o.setting, along)), i) for i, o in enumerate(group) if value(o) is not None)
    values = [v for _, i in points if (v := value(group[i])) is not None]
    return Curve("", title, name, metric, x_label, [x for x, _ in points], values)


def _table(sweep: Sweep, key: str) -> Grid:
    """Retention, or steps of both stages, downwards; w to the right."""
    weights = sorted({o.setting.w for o in sweep.outcomes})
    if sweep.kind == "guidance":
        by = {(o.setting.retention, o.setting.w): o for o in sweep.outcomes}
        rows = sorted({o.setting.retention or 0.0 for o in sweep.outcomes})
        names = [f"p = {p:g}" for p in rows]
        table = [[by.get((p, w)) for w in weights] for p in rows]
    else:
        steps = sorted({(o.setting.sim_steps, o.setting.real_steps) for o in sweep.outcomes})
        at = {(o.setting.sim_steps, o.setting.real_steps, o.setting.w): o for o in sweep.outcomes}
        names = [f"{ns} + {nr} steps" for ns, nr in steps]
        table = [[at.get((ns, nr, w)) for w in weights] for ns, nr in steps]
    metric = METRICS[key]
    return Grid(
        title=f"{metric.label}{f' ({metric.unit})' if metric.unit else ''}",
        metric=key,
        rows=names,
        columns=[f"w = {w:g}" for w in weights],
        cells=[[None if o is None else o.metrics.get(key) for o in row] for row in table],
        seconds=[[math.nan if o is None else o.latency for o in row] for row in table],
    )


def _training(log: Path) -> TrainingCurve:
    read = TrainingCurve.from_jsonl(log.parent.name, log)
    return TrainingCurve(read.name, {k: v for k, v in read.values.items() if k in LOGGED})


def _caveats(found: Found) -> list[str]:
    """What the numbers cannot say by themselves."""
    caveats = []
    names = [r.name for _, r in found.results]
    if names and len(names) == len(set(names)):
        caveats.append("One seed a method: intervals are over clips, not over trainings or noise.")
    if any(r.protocol.clips < 30 for _, r in found.results):
        caveats.append("Fewer than 30 clips: intervals are rough.")
    return caveats


def _is_result(path: Path) -> bool:
    try:
        return is_result(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError):
        return False
