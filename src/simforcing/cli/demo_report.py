"""The demo's evaluation: settings chosen on validation clips, numbers on test clips, `metrics.json` and the page."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from simforcing.data import open_dataset
from simforcing.data.windows import load_split
from simforcing.errors import SimForcingError
from simforcing.evaluate import metrics, study
from simforcing.evaluate.clips import EvaluationClips, evaluation_clips
from simforcing.evaluate.protocol import Protocol, hash_clips
from simforcing.evaluate.report import (
    Clip,
    GuidanceCurve,
    HorizonCurve,
    ReportData,
    Row,
    Timing,
    TrainingCurve,
    WhatRan,
    write_report,
)
from simforcing.evaluate.statistics import Difference, Interval, bootstrap_columns
from simforcing.evaluate.study import ROWS, SOURCES, Choice, Models, Study, source_name, student_name
from simforcing.files import write_text
from simforcing.model.world_model import WorldModel
from simforcing.predict.predictor import Predictor
from simforcing.recipes import recipe

if TYPE_CHECKING:
    from simforcing.cli.demo import Demo, Stages
    from simforcing.cli.show import Report

SHIPPED = "shipped student"
WEIGHTS = (0.3, 0.6, 1.0)


@dataclass
class Findings:
    """What the evaluation found."""

    choice: Choice
    headline: str
    test: Study
    rows: dict[str, dict[str, Interval]]
    differences: list[Difference]
    ratios: dict[str, Interval]
    agreement: float
    latency: dict[str, float]
    shipped: str | None  # row of the student that ships


def evaluate_and_report(demo: "Demo", log: "Stages", report: "Report") -> None:
    """Writes `metrics.json` and `report/index.html`."""
    torch.set_num_threads(demo.workers)
    dataset, split = open_dataset(demo.out / "pairs"), load_split(demo.out / "latents" / "split.json")
    models = _models(demo)
    rule = models.student.preparation.rule
    clips = {part: evaluation_clips(dataset, rule, split[part], n) for part, n in (("val", 1), ("test", 2))}
    lines = {"n": 0}

    def tell(line: str) -> None:
        lines["n"] += 1
        report("choosing settings and evaluating", min(0.99, lines["n"] / 50), line[:60])

    found = examine(models, clips["val"], clips["test"], demo.seed, tell)
    protocol = _protocol(demo, clips["test"], found)
    write_text(demo.out / "metrics.json", json.dumps(_numbers(demo, found, protocol, log), indent=2) + "\n")
    write_report(demo.out / "report", _page(demo, found, protocol, log))
    report("choosing settings and evaluating", 1.0, "page written")


def examine(models: Models, val: EvaluationClips, test: EvaluationClips, seed: int, tell: Any) -> Findings:
    """Chooses on validation clips, measures on test clips."""
    choice = study.choose(Study(val, models, seed), report=tell)
    test_study = Study(test, models, seed)
    headline = study.run(test_study, choice, WEIGHTS, tell)
    shipped = _add_shipped(models, val, test_study, tell)
    rendered = student_name("rendered", choice.student["rendered"].w)
    z = {view: models.student.encode(getattr(test, view)) for view in ("real", "sim")}
    return Findings(
        choice=choice,
        headline=headline,
        test=test_study,
        rows=study.intervals(test_study),
        differences=study.differences(test_study, headline, (rendered,)),
        ratios=study.action_ratios(test_study, choice),
        agreement=study.motion_agreement(z["real"], z["sim"]),
        latency=study.latency(test_study, choice.student[choice.best]),
        shipped=shipped,
    )


def _models(demo: "Demo") -> Models:
    teacher = Predictor(WorldModel.from_pretrained(demo.teacher_model))
    trained = {
        name: Predictor(WorldModel.from_pretrained(demo.out / name / "model"), teacher.codec)
        for name in ("student", "scratch", "finetuned")
    }
    return Models(teacher=teacher, **trained)


def _add_shipped(models: Models, val: EvaluationClips, test: Study, tell: Any) -> str | None:
    """The student that ships, trained longer, if this installation has one; its setting is chosen on validation too."""
    try:
        shipped = Predictor(WorldModel.from_pretrained("bundled-student"), models.student.codec)
    except SimForcingError:
        return None
    longer = Models(models.teacher, shipped, models.scratch, models.finetuned)
    on_val = Study(val, longer, test.seed)
    settings = [study.Setting("teacher", w, 4, n) for w in (0.6, 1.0) for n in (3, 10)]
    best = max(settings, key=lambda s: on_val.score_of(on_val.predict(s)))
    on_test = Study(test.clips, longer, test.seed)
    tell(SHIPPED)
    name = f"{SHIPPED}, w = {best.w:g}, {source_name('teacher')}"
    test.add(name, on_test.predict(best))
    return name


def _protocol(demo: "Demo", clips: EvaluationClips, found: Findings) -> Protocol:
    setting = found.choice.student[found.choice.best]
    split = (demo.out / "latents" / "split.json").read_bytes()
    return Protocol(
        split_sha256=hashlib.sha256(split).hexdigest(),
        clips_sha256=hash_clips(clips.window_names()),
        clips=len(clips),
        frames=clips.real.shape[1],
        fps=clips.fps,
        height=clips.real.shape[2],
        width=clips.real.shape[3],
        sim_steps=setting.sim_steps,
        real_steps=setting.real_steps,
        guidance=setting.w,
        seed=demo.seed,
    )


def _group(name: str) -> str:
    if name in (ROWS["copy"], ROWS["ceiling"]):
        return "controls"
    if name in (ROWS["scratch"], ROWS["finetuned"]):
        return "baselines, the same training time"
    if name.startswith(SHIPPED):
        return "longer training"
    return "student: rendered simulation" if "rendered" in name else "student"


def _weight(name: str) -> float | None:
    return float(name.split("w = ")[1].split(",")[0]) if "w = " in name else None


def _steps(demo: "Demo") -> dict[str, Any]:
    result = {}
    for run in ("scratch", "finetuned", "student"):
        rows = [json.loads(line) for line in (demo.out / run / "log.jsonl").read_text().splitlines()]
        result[run] = {"steps": rows[-1]["step"], "seconds": rows[-1]["seconds"]}
    return result


def _numbers(demo: "Demo", found: Findings, protocol: Protocol, log: "Stages") -> dict[str, Any]:
    """What `metrics.json` holds."""
    keys = ("psnr", "psnr_moving", "ssim", "sharpness")
    rows = [
        {"name": name, "group": _group(name), "w": _weight(name), **{k: values[k] for k in keys}}
        for name, values in found.rows.items()
    ]
    return {
        "headline": found.headline,
        "rows": rows,
        "differences": found.differences,
        "action_ratio": {k: round(v["mean"], 4) for k, v in found.ratios.items()},
        "action_ratio_intervals": found.ratios,
        "motion_agreement": round(found.agreement, 4),
        "chosen": {
            "student": {k: asdict(v) for k, v in found.choice.student.items()},
            "steps": dict(found.choice.steps),
            "best": found.choice.best,
            "on": "validation clips",
        },
        "tried": found.choice.tried,
        "training": _steps(demo),
        "seconds": {**log.seconds, "a clip": found.latency},
        "protocol": protocol.to_dict(),
    }


def _page(demo: "Demo", found: Findings, protocol: Protocol, log: "Stages") -> ReportData:
    setting = found.choice.student[found.choice.best]
    steps = _steps(demo)
    return ReportData(
        title="SimForcing demo",
        summary=[
            f"{len(found.test.clips)} held-out clips of {len(np.unique(found.test.clips.episode))} episodes, "
            "predicted frames only. "
            f"Settings were chosen on other clips: {source_name(found.choice.best)}, w = {setting.w:g}, "
            f"{setting.sim_steps} + {setting.real_steps} steps.",
            f"Student and baselines trained on {demo.train_episodes} paired episodes for {demo.seconds:.0f} s each, "
            "beside each other, one thread each: "
            + ", ".join(f"{name} {v['steps']} steps" for name, v in steps.items())
            + ".",
            f"Simulation and real view agree in latent motion with a cosine of {found.agreement:.2f}.",
        ],
        rows=[Row(name, _group(name), values, _weight(name)) for name, values in found.rows.items()],
        differences=found.differences,
        guidance=_curves(found),
        action_ratios=found.ratios,
        horizon=_horizon(found),
        training=[_training_curve(demo.out / name / "log.jsonl", name) for name in steps],
        clips=_clips(found),
        timings=[
            Timing(name, value, f"batch of 16, {demo.workers} threads, one measurement")
            for name, value in found.latency.items()
        ],
        protocol=protocol,
        what_ran=WhatRan(
            [
                f"simforcing demo --out {demo.out.name}",
                *(f"simforcing {' '.join(c)}" for c in _relative(demo)),
            ],
            {"everything": demo.seed},
        ),
        caveats=[
            "The 'real' camera of the bundled world is a rendered stand-in, not a robot: the page shows that the "
            "method works, not how well it does on your data.",
            "One training seed: intervals are over clips, not over trainings.",
            *recipe("demo").notes,
        ],
        fps=found.test.clips.fps,
    )


def _training_curve(log: Path, name: str) -> TrainingCurve:
    """What a short run may not have logged is left out."""
    shown = ("total", "val_action_ratio", "val_flow_0.9")
    return TrainingCurve(name, {k: v for k, v in TrainingCurve.from_jsonl(name, log).values.items() if k in shown})


def _relative(demo: "Demo") -> list[list[str]]:
    prefix = f"{demo.out}/"
    return [[word.removeprefix(prefix) for word in command] for command in demo.commands()]


def _curves(found: Findings) -> list[GuidanceCurve]:
    curves = []
    for metric in ("psnr_moving", "psnr", "ssim"):
        for source in SOURCES:
            weights = [0.0, *sorted({*WEIGHTS, found.choice.student[source].w})]
            values = [found.rows[student_name(source, w)][metric] for w in weights]
            curves.append(GuidanceCurve(source_name(source), metric, weights, values))
    return curves


def _horizon(found: Findings) -> list[HorizonCurve]:
    names = [found.headline, ROWS["finetuned"], ROWS["scratch"], ROWS["copy"], ROWS["ceiling"]]
    clips = found.test.clips
    return [
        HorizonCurve(
            n,
            bootstrap_columns(metrics.psnr_by_frame(found.test.videos[n], clips.real), clusters=clips.episode),
        )
        for n in names
    ]


def _clips(found: Findings, count: int = 8) -> list[Clip]:
    """Clips spread over the test set by how much moves in them."""
    test, choice = found.test, found.choice
    setting = choice.student[choice.best]
    models = test.models
    moving = metrics.moving_mask(test.clips.real)[:, 1:].mean((1, 2, 3))
    order = np.argsort(-moving)
    chosen = order[np.linspace(0, 3 * len(order) // 4, min(count, len(order))).astype(int)]
    predicted = models.student.decode(test.simulation(choice.best, setting.sim_steps))
    shown = {
        "student": found.headline,
        **({"shipped student": found.shipped} if found.shipped else {}),
        "real only": ROWS["finetuned"],
    }
    result = []
    for i in chosen:
        videos = {"real": test.clips.real[i]} | {label: test.videos[row][i] for label, row in shown.items()}
        videos |= {"predicted simulation": predicted[i], "rendered simulation": test.clips.sim[i]}
        e, s = test.clips.window_names()[i]
        result.append(Clip(f"episode {e}, row {s}: {test.clips.tasks[i]}", videos))
    return result
