"""The comparison that settles what SimForcing is worth: methods, controls, settings chosen on other clips.

Legend: N clips, T frames, C F h w latents.

Every trained method gets its own number of sampling steps, and the student its guidance weight, chosen on validation
episodes by PSNR on moving pixels; the test episodes are looked at once. Simulation comes from three places, shown
apart: the student's own prediction, the teacher's, and the rendered replay of the commands.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, UInt8
from torch import Tensor

from simforcing.evaluate import metrics
from simforcing.evaluate.clips import EvaluationClips
from simforcing.evaluate.statistics import Difference, Interval, bootstrap, paired_difference, paired_ratio
from simforcing.predict.predictor import Predictor
from simforcing.predict.sampler import Guidance

SOURCES = ("student", "teacher", "rendered")
PREDICTED = ("student", "teacher")
Videos = UInt8[np.ndarray, "N T H W 3"]
Report = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """How the student is sampled: where its simulation comes from, guidance weight, steps of both stages."""

    source: str = "teacher"
    w: float = 0.6
    sim_steps: int = 1
    real_steps: int = 10


@dataclass(frozen=True)
class Grid:
    """What is tried on validation clips."""

    w: tuple[float, ...] = (0.3, 0.6, 1.0)
    sim_steps: tuple[int, ...] = (1, 4)
    real_steps: tuple[int, ...] = (1, 3, 10)


@dataclass(frozen=True)
class Models:
    """The trained models; `scratch` and `finetuned` have seen real video only, `finetuned` starts from the teacher."""

    teacher: Predictor
    student: Predictor
    scratch: Predictor
    finetuned: Predictor


@dataclass
class Study:
    """Runs methods on one set of clips and keeps their per-clip scores and videos."""

    clips: EvaluationClips
    models: Models
    seed: int = 0
    scores: dict[str, dict[str, Float64[np.ndarray, " N"]]] = field(default_factory=dict)
    videos: dict[str, Videos] = field(default_factory=dict)
    _sim: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def add(self, name: str, video: Videos) -> None:
        """Scores a method's videos."""
        self.videos[name] = video
        self.scores[name] = metrics.score(video, self.clips.real)

    def simulation(self, source: str, steps: int) -> Tensor:
        """Simulation latents from one of `SOURCES`; kept."""
        key = (source, 0 if source == "rendered" else steps)
        if key not in self._sim:
            if source == "rendered":
                self._sim[key] = self.models.student.encode(self.clips.sim)
            else:
                model = self.models.student if source == "student" else self.models.teacher
                self._sim[key] = model.simulation(self.clips.begin(self.seed), steps)
        return self._sim[key]

    def predict(self, setting: Setting) -> Videos:
        """The student under a setting; w = 0 needs no simulation."""
        start = self.clips.begin(self.seed)
        sim = None if setting.w == 0 else self.simulation(setting.source, setting.sim_steps)
        student = self.models.student
        return student.decode(student.real(start, setting.real_steps, sim, Guidance(setting.w)))

    def plain(self, model: Predictor, steps: int) -> Videos:
        """A baseline: no simulation."""
        return model.decode(model.real(self.clips.begin(self.seed), steps))

    def score_of(self, video: Videos) -> float:
        """PSNR on moving pixels, averaged over clips: what settings are chosen by."""
        return float(np.nanmean(metrics.psnr_moving(video, self.clips.real)))


@dataclass(frozen=True)
class Choice:
    """Settings chosen on validation clips, and every value that was tried."""

    student: Mapping[str, Setting]  # by source of the simulation
    steps: Mapping[str, int]  # of the baselines, and of the student at w = 0
    best: str  # the predicted source that did best
    tried: list[dict[str, Any]]


def choose(study: Study, grid: Grid = Grid(), report: Report = lambda line: None) -> Choice:
    """Chooses on the study's (validation) clips: steps of the real stage at w = 1, then w with those steps."""
    tried: list[dict[str, Any]] = []

    def value(name: str, video: Videos, **setting: Any) -> float:
        psnr = study.score_of(video)
        tried.append({"name": name, **setting, "psnr_moving": round(psnr, 4)})
        report(f"{name} {setting}: {psnr:.2f} dB on moving pixels")
        return psnr

    steps = {}
    for name, model in (
        ("scratch", study.models.scratch),
        ("finetuned", study.models.finetuned),
        ("student", study.models.student),
    ):
        found = {n: value(name, study.plain(model, n), real_steps=n) for n in grid.real_steps}
        steps[name] = max(found, key=found.__getitem__)
    settings, values = {}, {}
    for source in SOURCES:

        def guided(setting: Setting) -> float:
            return value("student", study.predict(setting), **asdict(setting))

        tries: dict[Setting, float] = {}
        for ns in (1,) if source == "rendered" else grid.sim_steps:
            at_one = {s: guided(s) for s in (Setting(source, 1.0, ns, n) for n in grid.real_steps)}
            n = max(at_one, key=at_one.__getitem__).real_steps
            tries |= at_one | {s: guided(s) for s in (Setting(source, w, ns, n) for w in grid.w if w != 1)}
        settings[source] = max(tries, key=tries.__getitem__)
        values[source] = tries[settings[source]]
    return Choice(settings, steps, max(PREDICTED, key=lambda s: values[s]), tried)


ROWS = {
    "copy": "copy of the first frame",
    "ceiling": "codec ceiling",
    "scratch": "real only, from scratch",
    "finetuned": "real only, from the teacher",
}


def student_name(source: str | None, w: float) -> str:
    """How a row of the student is called."""
    return f"student, w = {w:g}" if source is None or w == 0 else f"student, w = {w:g}, {source_name(source)}"


def source_name(source: str) -> str:
    """Where the simulation comes from, in words."""
    return {
        "student": "simulation by the student",
        "teacher": "simulation by the teacher",
        "rendered": "rendered simulation",
    }[source]


def run(
    study: Study,
    choice: Choice,
    weights: tuple[float, ...] = (0.3, 0.6, 1.0),
    report: Report = lambda line: None,
) -> str:
    """All rows on the study's (test) clips, once; returns the name of the headline row."""
    clips, models = study.clips, study.models
    study.add(ROWS["copy"], np.repeat(clips.real[:, :1], clips.real.shape[1], axis=1))
    study.add(ROWS["ceiling"], models.student.decode(models.student.encode(clips.real)))
    for name in ("scratch", "finetuned"):
        report(ROWS[name])
        study.add(ROWS[name], study.plain(getattr(models, name), choice.steps[name]))
    report("student, w = 0")
    study.add(student_name(None, 0.0), study.plain(models.student, choice.steps["student"]))
    for source in SOURCES:
        chosen = choice.student[source]
        for w in sorted({*weights, chosen.w}):
            report(student_name(source, w))
            study.add(
                student_name(source, w),
                study.predict(Setting(source, w, chosen.sim_steps, chosen.real_steps)),
            )
    return student_name(choice.best, choice.student[choice.best].w)


def intervals(study: Study) -> dict[str, dict[str, Interval]]:
    """Mean and 95 % interval of every metric of every row; whole episodes are resampled."""
    return {
        name: {metric: bootstrap(values, clusters=study.clips.episode) for metric, values in scores.items()}
        for name, scores in study.scores.items()
    }


def differences(study: Study, headline: str, extra: tuple[str, ...] = ()) -> list[Difference]:
    """Paired differences of the headline (and of extra rows) to every baseline, in every metric but sharpness."""
    against = [ROWS["finetuned"], ROWS["scratch"], ROWS["copy"], student_name(None, 0.0)]
    result = []
    for name in (headline, *extra):
        for other in against:
            if other == name:
                continue
            for metric in ("psnr_moving", "psnr", "ssim"):
                a, b = study.scores[name][metric], study.scores[other][metric]
                result.append(
                    paired_difference(a, b, name_a=name, name_b=other, metric=metric, clusters=study.clips.episode)
                )
    return result


def action_ratios(study: Study, choice: Choice) -> dict[str, Interval]:
    """Error with exchanged actions over error with the true ones, of whole rollouts.

    Error: mean squared difference of predicted latent frames to the encoded truth, per clip. Each clip gets the
    actions of a clip of another episode, in both stages; first frame, state, text and noise stay.
    """
    clips, models = study.clips, study.models
    start = clips.begin(study.seed)
    wrong = start.with_actions_of(clips.others())
    setting = choice.student[choice.best]
    source = models.student if choice.best == "student" else models.teacher
    truth = {"real": models.student.encode(clips.real), "sim": models.student.encode(clips.sim)}

    def ratio(domain: str, rollout: Callable[[Any], Tensor]) -> Interval:
        a, b = (_error(rollout(s), truth[domain]) for s in (wrong, start))
        return paired_ratio(a, b, clusters=clips.episode)

    return {
        "teacher": ratio("sim", lambda s: models.teacher.simulation(s, 4)),
        "student": ratio(
            "real",
            lambda s: models.student.real(
                s, setting.real_steps, source.simulation(s, setting.sim_steps), Guidance(setting.w)
            ),
        ),
        "student, w = 0": ratio("real", lambda s: models.student.real(s, choice.steps["student"])),
        ROWS["finetuned"]: ratio("real", lambda s: models.finetuned.real(s, choice.steps["finetuned"])),
        ROWS["scratch"]: ratio("real", lambda s: models.scratch.real(s, choice.steps["scratch"])),
    }


def _error(latents: Tensor, truth: Tensor) -> Float64[np.ndarray, " N"]:
    return (latents - truth)[:, :, 1:].square().flatten(1).mean(1).double().numpy()


def motion_agreement(real: Tensor, sim: Tensor) -> float:
    """Cosine between the adjacent-frame differences of paired latents: how well simulation and real video agree."""
    a, b = (z.diff(dim=2).flatten(1) for z in (real, sim))
    return float(torch.nn.functional.cosine_similarity(a, b).mean())


def latency(study: Study, setting: Setting) -> dict[str, float]:
    """Seconds a clip of each stage of a guided rollout, one batch of the predictor, measured once after a warm-up."""
    begin = study.clips.begin(study.seed).part(slice(0, 16))
    source = study.models.student if setting.source == "student" else study.models.teacher
    student = study.models.student
    sim = source.simulation(begin, setting.sim_steps)
    result, state = {}, {"sim": sim, "real": student.real(begin, 1, sim, Guidance(setting.w))}
    stages: dict[str, Callable[[], Any]] = {
        "simulation stage": lambda: source.simulation(begin, setting.sim_steps),
        "real stage": lambda: student.real(begin, setting.real_steps, state["sim"], Guidance(setting.w)),
        "decoding": lambda: student.decode(state["real"]),
    }
    for name, stage in stages.items():
        began = time.perf_counter()
        stage()
        result[name] = (time.perf_counter() - began) / len(begin)
    return result
