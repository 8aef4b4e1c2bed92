"""From a study's folder to `results.json` and `results.md`: verdicts, tables, and how everything was measured."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simforcing.evaluate.campaign import plan
from simforcing.evaluate.campaign.claimed import ours, paper
from simforcing.evaluate.campaign.claims import Judged, Outcome, cell, label_of
from simforcing.evaluate.campaign.plan import METHODS, RETENTIONS, Sizes
from simforcing.evaluate.campaign.queue import missing, spent
from simforcing.evaluate.campaign.speed import Speed
from simforcing.evaluate.metrics import METRICS
from simforcing.evaluate.protocol import METHOD, Protocol, check_same
from simforcing.evaluate.report.wording import number, signed, with_interval
from simforcing.evaluate.results import Comparison, Result
from simforcing.evaluate.statistics import Interval, over_seeds
from simforcing.evaluate.sweep import cell_file
from simforcing.files import write_text

FORMAT = "simforcing-study-1"
COLUMNS = ("psnr", "psnr_moving", "ssim", "arm_track", "temporal_error", "sharpness", "frechet_codec")
FREE = ("machine", "code")
"""Fields of a protocol in which the parts of a study may differ: it may go on elsewhere, and later."""
RULE = (
    "With d = a - b in the metric named (PSNR of the predicted frames unless said otherwise) and its 95 % interval "
    "(percentile bootstrap over training seeds and, crossed with them, whole episodes; seeds of a and b together where "
    "both sample the same models): *better* holds above 0 and does not hold below 0; *alike* holds within the margin "
    "(0.1 dB) and does not hold beyond it on one side; *no worse* holds above minus the margin and does not hold below "
    "it; all else is not decided. A claim with several tests holds where all hold, and does not hold where one does "
    "not; *by less than the margin*: by less than 0.1 dB (SSIM 0.005), which is decided but small. That a setting is "
    "the best of a sweep is tested against the one with the highest mean of all others. Of arm track and temporal "
    "error less is better. A distance between sets is compared by its range over seeds. What was trained once decides "
    "nothing. p: two-sided, signs of whole episodes' differences flipped, on means over seeds; it knows nothing of how "
    "trainings differ, the intervals do. "
    "Intervals over two or three seeds are still too narrow, and nothing is corrected for the number of tests: one "
    "that nearly touches its boundary is weak evidence."
)


@dataclass(frozen=True)
class Findings:
    """All results that are there, by `plan.reference` or `claims.cell`, a seed each."""

    sizes: Sizes
    measured: Mapping[str, Sequence[Result]]
    choices: Mapping[str, Sequence[Mapping[str, Any]]]
    steps: Mapping[str, Sequence[int]]
    seconds: float  # of all units together, on one thread each
    left: int
    speed: Speed

    @classmethod
    def load(cls, out: Path, sizes: Sizes) -> "Findings":
        """Reads a folder, also of a study that has not ended.

        Raises:
            SimForcingError: a file is damaged, or results were not measured alike.
        """
        measured: dict[str, list[Result]] = {}
        units = plan.units(sizes)
        for unit in units:
            task, file = unit.task, out / unit.file
            if isinstance(task, plan.Measurement) and file.exists():
                measured.setdefault(plan.reference(task.method, task.way), []).append(Result.load(file))
        for sweep in plan.SWEEPS:
            _add_sweep(measured, out, sizes, sweep)
        _check_alike(measured)
        choices, steps = {}, {}
        for method in METHODS:
            files = [out / plan.choice_file(method, seed) for seed in range(sizes.seeds)]
            if found := [json.loads(f.read_text(encoding="utf-8")) for f in files if f.exists()]:
                choices[method] = found
            logs = [out / plan.run_of(method, seed) / "log.jsonl" for seed in range(sizes.seeds)]
            if lines := [_last(log) for log in logs if log.exists()]:
                steps[method] = lines
        seconds = math.fsum(row["seconds"] for row in spent(out))
        return cls(
            sizes, measured, choices, steps, seconds, len(missing(out, units)), Speed.load(out / plan.CALIBRATION)
        )


def _add_sweep(measured: dict[str, list[Result]], out: Path, sizes: Sizes, sweep: str) -> None:
    """Every cell, under the file that stands for it; a setting whose seeds are not all there is left out."""
    cells = plan.sweep_plan(sizes, sweep)
    files: dict[str, list[Path]] = {}
    for one in cells.cells:
        s = one.setting
        name = cell(sweep, s.w, s.retention, (s.sim_steps, s.real_steps))
        files.setdefault(name, []).append(cell_file(out / "sweeps" / sweep, cells.measured_by(one)))
    read: dict[Path, Result] = {}
    for name, paths in files.items():
        if all(path.exists() for path in paths):
            for path in paths:
                if path not in read:
                    read[path] = Result.load(path)
            measured[name] = [read[path] for path in paths]


def _check_alike(measured: Mapping[str, Sequence[Result]]) -> None:
    """Refuses to compare what was not measured alike: results of one world, and cells of a sweep, among themselves."""
    for protocols in _groups(measured).values():
        check_same(protocols, {*METHOD, "guidance_kind", *FREE})


def _groups(measured: Mapping[str, Sequence[Result]]) -> dict[str, dict[str, Protocol]]:
    """Protocols by result, of each world and each sweep."""
    groups: dict[str, dict[str, Protocol]] = {}
    for name, results in measured.items():
        group = name.split()[0] if "@" not in name else "exact" if "-exact@" in name else "pairs"
        groups.setdefault(group, {}).update({f"{name} ({seed})": r.protocol for seed, r in enumerate(results)})
    return groups


def _last(log: Path) -> int:
    return int(json.loads(log.read_text(encoding="utf-8").strip().splitlines()[-1])["step"])


# -- writing --------------------------------------------------------------------------------------------------------


def write(out: Path, sizes: Sizes, target: Path, command: str) -> None:
    """Writes `target` (Markdown) and the same with the ending `.json`.

    Raises:
        SimForcingError: a file of the study is damaged, or results were not measured alike.
    """
    found = Findings.load(out, sizes)
    judged = {
        "paper": [c.judged(found.measured) for c in paper(sizes)],
        "ours": [c.judged(found.measured) for c in ours()],
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    stored = {
        "format": FORMAT,
        "command": command,
        "sizes": asdict(sizes),
        "claims": {name: [j.to_dict() for j in group] for name, group in judged.items()},
        "rows": rows(found),
        "chosen": found.choices,
        "steps": found.steps,
        "speed": asdict(found.speed),
        "seconds": round(found.seconds),
        "units_left": found.left,
        "protocols": {group: next(iter(p.values())).to_dict() for group, p in _groups(found.measured).items()},
        "code": _codes(found),
        "unavailable": _unavailable(found),
    }
    text = json.dumps(_plain(stored), indent=1, allow_nan=False) + "\n"
    write_text(target.with_suffix(".json"), text)
    write_text(target, page(found, judged, command))


def rows(found: Findings) -> dict[str, dict[str, Any]]:
    """Every setting: means with intervals over clips and seeds, number of seeds, spread of the seeds' means."""
    result: dict[str, dict[str, Any]] = {}
    for name, results in found.measured.items():
        row: dict[str, Any] = {"seeds": len(results)}
        for key in METRICS:
            columns = [r.per_clip.get(key) for r in results]
            if all(c is not None for c in columns):
                values = np.array(columns, np.float64)
                row[key] = dict(over_seeds(values, clusters=results[0].episodes))
                row[key]["by_seed"] = np.nanmean(values, axis=1).tolist()
            elif all(key in r.whole for r in results):
                row[key] = {
                    "mean": float(np.mean([r.whole[key] for r in results])),
                    "by_seed": [r.whole[key] for r in results],
                }
        if all(r.action for r in results):
            row["action_ratio"] = next(iter(Comparison({name: results}).action_ratios().values()))
        if all(r.latency for r in results):
            stages = {stage for r in results for stage in r.latency}
            row["latency"] = {
                s: float(np.median([v for r in results for v in r.latency.get(s, ())])) for s in sorted(stages)
            }
        result[name] = row
    return result


def _codes(found: Findings) -> dict[str, int]:
    """How many results each version of the code measured, most first."""
    return dict(Counter(r.protocol.code for results in found.measured.values() for r in results).most_common())


def _unavailable(found: Findings) -> list[str]:
    """Metrics whose networks were not to be had."""
    return sorted({key for results in found.measured.values() for result in results for key in result.unavailable})


def page(found: Findings, judged: Mapping[str, Sequence[Judged]], command: str) -> str:
    """The Markdown."""
    shown = rows(found)
    parts = [
        "# Results",
        _about(found, command),
        "## What the paper claims",
        _verdicts(judged["paper"], with_paper=True),
        "## Our candidates, and controls",
        _verdicts(judged["ours"], with_paper=False),
        "## How it is decided",
        RULE,
        "## Methods",
        _methods(found, shown),
        "## Sweep of retention p and guidance weight w",
        _guidance(found, shown),
        "## Sweep of steps",
        _steps(found, shown),
        "## Settings that validation chose",
        _chosen(found),
        "## How it was measured",
        _how(found, command),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _about(found: Findings, command: str) -> str:
    s = found.sizes
    ended = f" **The study has not ended: {found.left} units are missing.**" if found.left else ""
    return (
        f"Written by `{command}`. Bundled world, {s.seeds} training seeds ({s.sweep_seeds} of the sweep of "
        f"steps), {s.test * s.per_episode} held-out clips of {s.test} "
        f"episodes (sweeps: one clip of each), predicted frames only; trainings of {s.steps} steps on {s.main} paired "
        "episodes, from the teacher that ships. The 'real' camera is a rendered stand-in, models have 3 M parameters "
        f"and clips 13 frames of 64 x 64 pixels: what is decided here is decided at this scale.{ended}"
    )


SIGNS: dict[Outcome, str] = {
    "holds": "**holds**",
    "does not hold": "**does not hold**",
    "not decided": "not decided at this scale",
    "not measured": "not measured",
}
_WANTED = {"more": "better", "less": "less", "same": "alike", "no less": "no worse"}


def _verdicts(judged: Sequence[Judged], with_paper: bool) -> str:
    head = ["claim", *(["reported"] if with_paper else []), "measured: a - b", "verdict"]
    lines = []
    for j in judged:
        evidence = "<br>".join(_evidence(j, i) for i in range(len(j.tests))) or j.claim.why
        verdict = SIGNS[j.outcome]
        if j.small and j.outcome in ("holds", "does not hold"):
            verdict += ", by less than the margin"
        lines.append([j.claim.says, *([j.claim.paper] if with_paper else []), evidence, verdict])
    return _table(head, lines)


def _evidence(j: Judged, i: int) -> str:
    test, difference = j.tests[i], j.found[i]
    pair = f"{test.a} - {test.b}"
    if math.isnan(difference["mean"]):
        return f"{pair}: not measured"
    if test.metric == "latency":
        return f"{pair}: {with_interval(_times(difference, 100), 0)} % less time"
    p = "" if math.isnan(j.p[i]) else f", p = {j.p[i]:.2g}"
    also = "; ".join(f"{METRICS[k].label} {signed(d, METRICS[k].digits)}" for k, d in j.shown[i].items())
    metric = METRICS[test.metric]
    main = f"{label_of(test.metric)} {signed(difference, metric.digits, metric.unit)}{p}"
    return f"{pair}, {_WANTED[test.wanted]}: {main}" + (f" ({also})" if also else "")


def _times(interval: Interval, factor: float) -> Interval:
    mean, low, high = (factor * x for x in (interval["mean"], interval["low"], interval["high"]))
    return Interval(mean=mean, low=low, high=high, clips=interval["clips"], missing=interval["missing"])


def _methods(found: Findings, shown: Mapping[str, Mapping[str, Any]]) -> str:
    head = ["setting", "seeds", "steps", *(METRICS[k].label for k in COLUMNS), "action ratio", "s a clip"]
    lines = []
    for name, row in shown.items():
        method, at, _ = name.partition("@")
        if not at:
            continue
        steps = "" if row.get("latency") is None else str(found.steps.get(method, [0])[0])
        ratio = with_interval(row["action_ratio"], 2) if "action_ratio" in row else ""
        taken = number(sum(row["latency"].values()), 3) if "latency" in row else ""
        lines.append([name, str(row["seeds"]), steps, *(_value(row, k) for k in COLUMNS), ratio, taken])
    return _table(head, lines)


def _value(row: Mapping[str, Any], key: str) -> str:
    if key not in row:
        return ""
    digits = METRICS[key].digits
    if "low" in row[key]:
        return with_interval(row[key], digits)
    seeds = row[key]["by_seed"]
    return f"{number(row[key]['mean'], digits)} ({number(min(seeds), digits)} to {number(max(seeds), digits)})"


def _guidance(found: Findings, shown: Mapping[str, Mapping[str, Any]]) -> str:
    weights = found.sizes.weights
    lines = [
        [f"p = {p:g}", *(_value(shown.get(cell("guidance", w, p), {}), "psnr") for w in weights)] for p in RETENTIONS
    ]
    return f"PSNR in dB, {found.sizes.seeds} seeds, 1 + 10 steps.\n\n" + _table(
        ["", *(f"w = {w:g}" for w in weights)], lines
    )


def _steps(found: Findings, shown: Mapping[str, Mapping[str, Any]]) -> str:
    s = found.sizes
    lines = []
    for sim in s.sim_steps:
        for real in s.real_steps:
            cells = [shown.get(cell("steps", w, steps=(sim, real)), {}) for w in s.weights]
            taken = cells[-1].get("latency", {})
            lines.append([f"{sim} + {real}", *(_value(c, "psnr") for c in cells), number(sum(taken.values()), 3)])
    head = ["Ns + Nr", *(f"w = {w:g}" for w in s.weights), f"s a clip, w = {s.weights[-1]:g}"]
    return f"PSNR in dB, {min(s.sweep_seeds, s.seeds)} seeds.\n\n" + _table(head, lines)


def _chosen(found: Findings) -> str:
    lines = []
    for method, choices in found.choices.items():
        ways = [
            f"w = {c['way']['w']:g}"
            + (f" by the {c['source']}" if c["way"]["w"] else "")
            + f", {c['way']['real_steps']} steps"
            for c in choices
        ]
        lines.append([METHODS[method].label, "; ".join(ways)])
    return _table(["method", "each seed"], lines) if lines else ""


def _how(found: Findings, command: str) -> str:
    first = next((r.protocol for results in found.measured.values() for r in results), None)
    machine = first.machine if first else {}
    codes = "; ".join(f"{code} ({count} results)" for code, count in _codes(found).items())
    s, speed, lacking = found.sizes, found.speed, _unavailable(found)
    lines = [
        f"- `{command}`, {found.seconds / 60:.0f} minutes of work on one thread each; machine: "
        f"{machine.get('cpu', 'unknown')}, {machine.get('cores', '?')} threads, torch {machine.get('torch', '?')}; "
        f"code {codes or 'unknown'}.",
        f"- Equal time: a step of the full method takes {speed.ratio:.2f} steps of real-only training (seconds of the "
        f"processor, median over turns, measured once), so {speed.equal_time(s.steps)} steps against {s.steps}.",
        f"- Few, main and many are {s.few}, {s.main} and {s.many} real episodes; the exact twin has no lag, gain "
        "error, bias or camera error. Sweeps are measured on the test clips and choose nothing.",
        "- Latencies are of single clips on one thread, while another process worked beside" + _spread(found) + ".",
        *(
            [f"- Not measured, for want of their networks: {', '.join(METRICS[k].label for k in lacking)}."]
            if lacking
            else []
        ),
    ]
    return "\n".join(lines)


def _spread(found: Findings) -> str:
    """How far checkpoints of one setting differ, which should take equally long."""
    pairs = [r for name, r in found.measured.items() if name.startswith("steps ") and len(r) > 1 and r[0] is not r[1]]
    totals = [[sum(float(np.median(s)) for s in r.latency.values()) for r in results] for results in pairs]
    ratios = [max(t) / min(t) for t in totals if min(t) > 0]
    if not ratios:
        return ""
    return (
        f": two checkpoints of one setting, which do the same work, differ by {np.median(ratios):.2f} times in the "
        f"median and up to {max(ratios):.1f} times, so that they are rough"
    )


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def _plain(value: Any) -> Any:
    """For JSON: nan is null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6)
    return value
