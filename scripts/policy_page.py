"""The page of the policy study: success with intervals, learning curves, pictures; and all numbers as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simforcing.errors import SimForcingError
from simforcing.evaluate.measure import weights_hash
from simforcing.evaluate.protocol import code_version, describe_machine
from simforcing.evaluate.statistics import difference_over_seeds, over_seeds
from simforcing.files import write_text
from simforcing.policy.libero_results import common_fingerprint
from simforcing.policy.policy import Policy

Key = tuple[str, str, int]
"""Setting, start, seed."""
SAID = {
    "none": "scratch",
    "student": "student",
    "teacher": "teacher",
    "student-video": "student, its video expert for actions, too",
    "student-nothing": "student, without its action expert",
}
COLOURS = ("#555555", "#c2410c", "#1d4ed8", "#15803d", "#a16207")
ERROR = "val_action_error"


def write_page(page: Path, out: Path, sizes: Mapping[str, Any], keys: Sequence[Key]) -> None:
    """Writes the page, and beside it `<name>.json`, `images/policy-curves.png` and `images/policy-trials.png`."""
    found = {key: record for key in keys if (record := read(out, key)) is not None}
    tried = {key: records_of(out, key) for key in found}
    simulated = common_means([row for rows in tried.values() for row in rows.items()])
    for key, record in found.items():
        record["trials"] = endings(tried[key], int(sizes["trials"]))
    numbers = {
        "sizes": dict(sizes),
        "machine": describe_machine() | {"torch_threads": 1},  # what every part was run with
        "code": code_version(),
        "simulation": simulated,
        "demonstrations": demonstrations(out),
        "world models": {name: last_validation(out / name) for name in ("teacher", "student")},
        "policies": {_name(key): record for key, record in found.items()},
    }
    images = page.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    write_text(page.with_suffix(".json"), json.dumps(numbers, indent=1, allow_nan=False) + "\n")

    curves(images / "policy-curves.png", found)
    filmed = trials_picture(images / "policy-trials.png", out)
    write_text(page, "\n".join(lines(numbers, keys, found, filmed)) + "\n")


def read(out: Path, key: Key) -> dict[str, Any] | None:
    """A policy's validation errors by step; None where it was not trained."""
    log = out / "policies" / _name(key) / "log.jsonl"
    if not (log.parent / "model").exists():
        return None
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return {
        "curve": sorted({row["step"]: row[ERROR] for row in rows if ERROR in row}.items()),
        "seconds": rows[-1]["seconds"],
    }


def records_of(out: Path, key: Key) -> dict[str, dict[str, Any]]:
    """Its trials, by their file below OUT.

    Raises:
        SimForcingError: one is of other weights than the policy has now.
    """
    files = sorted((out / "evaluations" / _name(key) / "trials").glob("*/*.json"))
    records = {file.relative_to(out).as_posix(): json.loads(file.read_text()) for file in files}
    own = policy_hash(out / "policies" / _name(key) / "model") if records else ""
    for name, record in records.items():
        if record["policy_sha256"] != own:
            raise SimForcingError(f"{out / name}: a trial of other weights than the policy has; delete it")
    return records


def policy_hash(model: Path) -> str:
    """What its trials know it by."""
    return weights_hash(Policy.from_pretrained(model))


def common_means(records: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """What all trials of all policies were simulated by.

    Raises:
        SimForcingError: two trials differ in this, or in their protocol.
    """
    for name, record in records:
        if record["protocol_sha256"] != records[0][1]["protocol_sha256"]:
            raise SimForcingError(f"{name}: a trial of another protocol than {records[0][0]}; they are not averaged")
    return common_fingerprint(dict(records))


def endings(records: Mapping[str, Mapping[str, Any]], trials: int) -> dict[str, list[str]]:
    """How each trial of a task ended, of the tasks whose trials are all there."""
    found: dict[str, dict[int, str]] = {}
    for name, record in records.items():
        found.setdefault(Path(name).parent.name, {})[record["trial"]] = record["ending"]
    return {
        task: [ended[trial] for trial in range(trials)]
        for task, ended in sorted(found.items())
        if set(range(trials)) <= set(ended)
    }


def _name(key: Key) -> str:
    return "-".join(map(str, key))


def demonstrations(out: Path) -> dict[str, Any]:
    """How often the expert succeeded, by task."""
    meta = json.loads((out / "demos/meta/simforcing.json").read_text())
    return dict(meta["libero"]["expert"]["tasks"])


def last_validation(run: Path) -> dict[str, Any]:
    """The last validated numbers of a world model."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    validated = [row for row in rows if any(name.startswith("val_") for name in row)]
    kept = {name: value for name, value in validated[-1].items() if name.startswith("val_")}
    return {"steps": rows[-1]["step"], "seconds": rows[-1]["seconds"], **kept}


# -- numbers -----------------------------------------------------------------------------------------------------------


def successes(found: Mapping[Key, dict[str, Any]], keys: Sequence[Key], tasks: int) -> np.ndarray | None:
    """[seeds, tasks x trials] of 0 and 1, the same initial states in the same columns.

    None unless all trials of all of these policies, each of so many tasks, are there.
    """
    records = [found[key]["trials"] for key in keys if key in found]
    if len(records) < len(keys) or any(len(trials) < tasks for trials in records):
        return None
    rows = [[ending == "success" for task in sorted(trials) for ending in trials[task]] for trials in records]
    return np.array(rows, float)


def curve(found: Mapping[Key, dict[str, Any]], setting: str, start: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Steps [n], and errors [seeds, n]."""
    rows = [np.array(r["curve"]) for (a, b, _), r in found.items() if (a, b) == (setting, start)]
    return (rows[0][:, 0], np.stack([row[:, 1] for row in rows])) if rows else None


def lines(
    numbers: Mapping[str, Any], keys: Sequence[Key], found: Mapping[Key, dict[str, Any]], filmed: Sequence[str]
) -> list[str]:
    """The page."""
    sizes, planned = numbers["sizes"], {(setting, start) for setting, start, _ in keys}
    rows = [(a, b) for a in _seen(keys, 0) for b in _seen(keys, 1) if (a, b) in planned]
    made = "; ".join(
        f"{name} {row['episodes']} of {row['attempts']}" for name, row in numbers["demonstrations"].items()
    )
    seeds = len(_seen(found, 2))
    text = [
        "# Policies: what the first weights are worth",
        "",
        "Written by `python scripts/policy_study.py --page docs/policy-results.md`; all numbers are in "
        "[policy-results.json](policy-results.json). A small study: "
        f"{len(sizes['tasks'])} tasks of {sizes['suite']}, {sizes['episodes']} scripted demonstrations each "
        f"(expert: {made} attempts), pictures of 64 x 64, a policy of 3 M weights, {sizes['policy_steps']} steps of 16 "
        f"windows (action-only {sizes['action_only_steps']}), {seeds} seeds, "
        f"{sizes['trials']} trials a task from the benchmark's initial states, at most "
        f"{sizes['limit']} steps. Machine: {_machine(numbers['machine'])}.",
        "",
        "Teacher and student learnt from the training demonstrations alone (the held-out ones are the same for all), "
        "so that the policies from them saw more steps on the same data; the policies' own steps are equal. "
        "Action-only freezes the video expert: from scratch that is one of random weights. Starts that take over less "
        "of the student ask which of its experts it is.",
        "",
        "## Success",
        "",
        "| setting | starts from | " + " | ".join(_tasks(found)) + " | all | minus scratch | minus student |",
        "|---|---|" + "---|" * (len(_tasks(found)) + 3),
    ]
    for setting, start in rows:
        text.append(_success_row(found, keys, setting, start, len(sizes["tasks"])))
    text += [
        "",
        "Successes of trials. *All*: of all seeds, with intervals at 95 % over seeds and initial states, both "
        "resampled (all seeds begin at the same states). *Minus*: the difference on these states and seeds of the same "
        f"setting, in percentage points, likewise. With {seeds} training seeds of a policy such intervals are too "
        "narrow, and there is one teacher and one student: what other ones were worth is not in any interval.",
        "",
        "## Error of actions on held-out demonstrations",
        "",
        "![mean absolute error of sampled actions against steps](images/policy-curves.png)",
        "",
        "| setting | starts from | error at the end, by seed | steps to scratch's error at the end |",
        "|---|---|---|---|",
    ]
    for setting, start in rows:
        text += _error_row(found, setting, start)
    text += [
        "",
        "Mean absolute error of sampled actions in the units of the recordings (a change of 1 is 5 cm or 0.5 rad; "
        "gripper 0 or 1), 32 windows. Steps: the first validation at which the mean over seeds is as low as scratch's "
        "last.",
        "",
    ]
    if filmed:
        text += ["## Trials", "", "![trials](images/policy-trials.png)", "", *[f"- {line}" for line in filmed], ""]
    return text[:-1]


def _success_row(found: Mapping[Key, dict[str, Any]], keys: Sequence[Key], setting: str, start: str, of: int) -> str:
    """of: tasks that each policy tries."""
    own = [key for key in keys if key[:2] == (setting, start)]
    table, names = successes(found, own, of), _tasks(found)
    if table is None:
        done = sum(len(group) for key in own if key in found for group in found[key]["trials"].values())
        return (
            f"| {setting} | {SAID[start]} | {'| ' * len(names)}{f'{done} trials so far' if done else 'not run'} | | |"
        )
    cells = [f"{round(part.sum())}/{part.size}" for part in np.split(table, of, axis=1)]
    cells.append(f"**{100 * table.mean():.0f} %** {_range(over_seeds(table))}")
    for other in ("none", "student"):
        beside = successes(found, [(setting, other, seed) for _, _, seed in own], of)
        if start in ("none", other) or beside is None:
            cells.append("")
            continue
        gap = difference_over_seeds(table, beside)
        cells.append(f"{100 * gap['mean']:+.0f} {_range(gap, '+')}")
    return f"| {setting} | {SAID[start]} | {' | '.join(cells)} |"


def _range(found: Mapping[str, Any], sign: str = "") -> str:
    return f"[{100 * found['low']:{sign}.0f}, {100 * found['high']:{sign}.0f}]"


def _error_row(found: Mapping[Key, dict[str, Any]], setting: str, start: str) -> list[str]:
    own, scratch = curve(found, setting, start), curve(found, setting, "none")
    if own is None:
        return [f"| {setting} | {SAID[start]} | not run | |"]
    steps, errors = own
    reached = ""
    if scratch is not None:
        below = steps[errors.mean(0) <= scratch[1].mean(0)[-1]]
        reached = f"{below[0]:.0f} of {steps[-1]:.0f}" if len(below) else f"not within {steps[-1]:.0f}"
    return [f"| {setting} | {SAID[start]} | {', '.join(f'{e:.4f}' for e in errors[:, -1])} | {reached} |"]


def _seen(keys: Iterable[Key], place: int) -> list[Any]:
    return list(dict.fromkeys(key[place] for key in keys))


def _tasks(found: Mapping[Key, dict[str, Any]]) -> list[str]:
    return sorted({task for record in found.values() for task in record["trials"]})


def _machine(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items() if value)


# -- pictures ----------------------------------------------------------------------------------------------------------


def curves(file: Path, found: Mapping[Key, dict[str, Any]]) -> None:
    """Errors against steps: a panel a setting, a colour a start, thin lines the seeds, thick ones their mean."""
    import matplotlib.pyplot as plt

    settings = _seen(found, 0)
    figure, axes = plt.subplots(1, len(settings), figsize=(5 * len(settings), 3.4), sharey=True, squeeze=False)
    for axis, setting in zip(axes[0], settings, strict=True):
        for start, colour in zip(SAID, COLOURS, strict=True):
            drawn = curve(found, setting, start)
            if drawn is None:
                continue
            steps, errors = drawn
            axis.plot(steps, errors.T, color=colour, linewidth=0.6, alpha=0.6)
            axis.plot(steps, errors.mean(0), color=colour, linewidth=2, label=f"from {SAID[start]}")
        axis.set(title=setting, xlabel="training steps", yscale="log")
        axis.grid(alpha=0.3, which="both")
        axis.legend(frameon=False, fontsize=7)
    axes[0][0].set_ylabel("error of sampled actions")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def trials_picture(file: Path, out: Path, columns: int = 5, height: int = 192) -> list[str]:
    """One filmed success and one failure, a row each; says what the rows are. Nothing where nothing was filmed."""
    from PIL import Image

    from simforcing.data.video import VideoFile

    rows, said = [], []
    for ending, words in (("success", "solved"), ("limit", "not solved within the limit")):
        films = sorted((out / "evaluations").glob(f"*/videos/*-{ending}.mp4"))
        if not films:
            continue
        film = VideoFile(films[0], None)
        picked = np.linspace(0, film.probe().frames - 1, columns).round() / film.fps
        row = np.concatenate(list(film.at(picked.tolist())), axis=1)
        rows.append(np.asarray(Image.fromarray(row).resize((row.shape[1] * height // row.shape[0], height))))
        said.append(f"row {len(rows)}: {films[0].parent.parent.name}, {films[0].stem.rsplit('-', 1)[0]}: {words}")
    if rows:
        Image.fromarray(np.concatenate(rows)).save(file)
    return said
