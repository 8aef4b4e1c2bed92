"""What a process of the study does: data, trainings, choices and measurements, by the commands that a user has.

Legend: N clips, T frames, H W pixels.
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from simforcing.cli.encode import Encode
from simforcing.cli.train import Train
from simforcing.data import open_dataset
from simforcing.data.windows import load_split, save_split, split_source
from simforcing.errors import SimForcingError
from simforcing.evaluate import metrics
from simforcing.evaluate.campaign import plan
from simforcing.evaluate.campaign.plan import CHOSEN, METHODS, PAPER, WAYS, Sampling, Sizes, Source, Unit
from simforcing.evaluate.campaign.speed import Kind, Speed, ratio, step_seconds
from simforcing.evaluate.clips import EvaluationClips, evaluation_clips
from simforcing.evaluate.measure import Rollouts, Wanted, Way, measure, split_hash
from simforcing.evaluate.networks import Networks, default_directory
from simforcing.evaluate.perceptual import Perceptual
from simforcing.evaluate.sweep import Bench, is_blind
from simforcing.files import partial_path, write_text
from simforcing.model.codec import Codec
from simforcing.model.world_model import WorldModel
from simforcing.predict.predictor import Predictor
from simforcing.recipes import recipe
from simforcing.train.presets import PRESETS
from simforcing.train.roles import Data, distilled_loss, flow_loss, new_model, student_of
from simforcing.twin.playground import WorldConfig, write_pairs, write_simulation

RECIPE = "study"
EXACT = WorldConfig(lag=0.0, gain_error=0.0, bias=0.0, camera_shift=0.0, camera_turn=0.0)
"""The bundled world whose 'real' arm follows its commands and whose camera stands where the simulation's does."""
PAIR_SEED, EXACT_SEED, SIMULATION_SEED = 600_000, 620_000, 640_000
"""First seeds of the episodes; the demo's, and those of what ships, are others."""
T = TypeVar("T")


@dataclass
class Worker:
    """Does units of a study in OUT, on one thread."""

    out: Path
    sizes: Sizes

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.predictor = lru_cache(maxsize=8)(self._predictor)
        self.clips = lru_cache(maxsize=4)(self._clips)
        self._benches: dict[str, Bench] = {}

    def do(self, unit: Unit) -> None:
        """Makes the file of a unit."""
        task = unit.task
        if isinstance(task, plan.DataSet):
            self._data(task.name)
        elif isinstance(task, plan.Calibration):
            self._calibrate().save(self.out / unit.file)
        elif isinstance(task, plan.Training):
            self._train(task)
        elif isinstance(task, plan.Choice):
            self._choose(task, self.out / unit.file)
        elif isinstance(task, plan.Measurement):
            self._measure(task, self.out / unit.file)
        else:
            self._sweep(task)

    # -- data -------------------------------------------------------------------------------------------------------

    def _data(self, name: str) -> None:
        """Draws (which leaves nothing behind when it is killed), then encodes (which goes on where it was)."""
        if name in ("main", "few"):
            return self._part(name)
        sizes, data = self.sizes, self.out / "data" / name
        data.parent.mkdir(parents=True, exist_ok=True)
        paired = name in ("many", "exact")
        count = sizes.trained_on(name) + sizes.val + sizes.test if paired else sizes.simulated
        if not data.exists():
            if name == "many":
                write_pairs(data, range(PAIR_SEED, PAIR_SEED + count), workers=1)
            elif name == "exact":
                write_pairs(data, range(EXACT_SEED, EXACT_SEED + count), EXACT, workers=1)
            else:
                seeds = range(SIMULATION_SEED, SIMULATION_SEED + count)
                write_simulation(data, seeds, augment=name == "augmented", workers=1)
        val, test = (sizes.val, sizes.test) if paired else (max(1, count // 20), 0)
        Encode(data, self._latents(name), recipe=RECIPE, val=val, test=test).run()

    def _part(self, name: str) -> None:
        """The latents of `many` with a split that trains on fewer of its episodes."""
        source, target = self._latents("many"), self._latents(name)
        partial = partial_path(target)
        shutil.copytree(source, partial)
        split = load_split(source / "split.json")
        split["train"] = split["train"][: self.sizes.trained_on(name)]
        save_split(partial / "split.json", split, split_source(source / "split.json"))
        partial.rename(target)

    def _latents(self, name: str) -> Path:
        return self.out / "latents" / name

    # -- training ---------------------------------------------------------------------------------------------------

    def _train(self, task: plan.Training) -> None:
        method = METHODS[task.method]
        role = PRESETS[method.preset].role
        steps = self.sizes.steps_of(method)
        if method.equal == "time":
            steps = Speed.load(self.out / plan.CALIBRATION).equal_time(steps)
        run = self.out / plan.run_of(task.method, task.seed)
        teacher = str(self.out / plan.model_of(method.teacher, task.seed)) if method.teacher in METHODS else None
        Train(
            role,
            data=self._latents(method.data),
            out=run,
            teacher=teacher or method.teacher or None,
            recipe=RECIPE,
            preset=method.preset,
            steps=steps,
            set=(*method.settings, "training.validate_seconds=1e9"),
            seed=task.seed,
            threads=1,
            device="cpu",
        ).run()
        shutil.rmtree(run / "checkpoints", ignore_errors=True)  # as large as the model three times over

    def _calibrate(self) -> Speed:
        """Times the kinds of training in turns, and one batch of rollouts."""
        found = recipe(RECIPE)
        teacher = WorldModel.from_pretrained("bundled-teacher")
        assert teacher.preparation is not None
        pairs, simulated = (
            Data(self._latents(name), self._latents(name) / "split.json", found) for name in ("main", "augmented")
        )
        clips, _ = pairs.parts(teacher.preparation, "student")
        prepared = simulated.preparation(found)
        fresh = new_model(found, prepared, simulated.channels, 0)
        kinds = {
            "baseline": Kind(student_of(teacher), flow_loss(), clips.one_domain("real"), found.baseline),
            "student": Kind(student_of(teacher), distilled_loss(teacher, found.objective), clips, found.student),
            "teacher": Kind(fresh, flow_loss(), simulated.parts(prepared, "teacher")[0], found.teacher),
        }
        times = step_seconds(kinds, self.sizes.turns)
        seconds = {name: float(np.median(values)) for name, values in times.items()}
        return replace(Speed(**seconds), ratio=ratio(times), **self._rollout_seconds())

    def _rollout_seconds(self, steps: int = 5) -> dict[str, float]:
        predictor, clips = self.predictor("bundled"), self.clips("pairs", "val")
        start = clips.begin().part(slice(0, 16))
        latents, forward = _timed(partial(predictor.real, start, steps))
        video, decoding = _timed(partial(predictor.decode, latents))
        _, scoring = _timed(partial(metrics.score, video, clips.real[: len(start)], keys=metrics.PIXEL))
        return {"forward": forward / steps / len(start), "clip": (decoding + scoring) / len(start)}

    # -- evaluation -------------------------------------------------------------------------------------------------

    @cached_property
    def codec(self) -> Codec:
        """One for all models."""
        return Predictor(WorldModel.from_pretrained("bundled-teacher")).codec

    def _predictor(self, model: str) -> Predictor:
        """A model by its directory below OUT, or the bundled teacher."""
        source = model if model == "bundled" else self.out / model
        return Predictor(WorldModel.from_pretrained(source), self.codec)

    def _clips(self, world: str, part: str, per_episode: int = 1) -> EvaluationClips:
        name = "exact" if world == "exact" else "many"
        split = load_split(self._latents(name) / "split.json")
        dataset = open_dataset(self.out / "data" / name)
        return evaluation_clips(dataset, recipe(RECIPE).rule, split[part], per_episode)

    def rollouts(self, method: str, seed: int, source: Source, clips: EvaluationClips) -> Rollouts:
        """A trained model on clips, with its simulation from one of the sources."""
        predictor = self.predictor(plan.model_of(method, seed))
        teacher = METHODS[method].teacher
        if source == "rendered":
            return Rollouts(predictor, clips, None)
        if source == "student":
            return Rollouts(predictor, clips, predictor)
        return Rollouts(
            predictor, clips, self.predictor(plan.model_of(teacher, seed) if teacher in METHODS else "bundled")
        )

    def _wanted(self, changes: tuple[str, ...], repeats: int) -> Wanted:
        networks = Networks(default_directory(), {}, download=False)
        return Wanted(Perceptual(networks, self.codec), first_frame=False, changes=changes, repeats=repeats)

    def _measure(self, task: plan.Measurement, file: Path) -> None:
        method, (label, sampling) = METHODS[task.method], self._sampling(task)
        clips = self.clips(task.clips, "test", self.sizes.per_episode)
        if sampling.way.samples:
            rollouts = self.rollouts(task.method, task.seed, sampling.source, clips)
        else:
            rollouts = Rollouts(self.predictor("bundled"), clips, None)
        changes = ("other",) if task.way in plan.ACTIONS else ()
        found = measure(
            rollouts,
            sampling.way,
            self._wanted(changes, self.sizes.repeats),
            name=f"{method.label}, {label}" if sampling.way.samples else label,
            model=plan.run_of(task.method, task.seed) if sampling.way.samples else "",
            simulation=sampling.source,
            split_sha256=split_hash(self._latents("exact" if task.clips == "exact" else "many") / "split.json"),
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        found.result.save(file)

    def _sampling(self, task: plan.Measurement) -> tuple[str, Sampling]:
        """Its label and itself; chosen ones differ from seed to seed under one label."""
        if task.way != CHOSEN:
            return WAYS[task.way].label, WAYS[task.way]
        stored = json.loads((self.out / plan.choice_file(task.method, task.seed)).read_text(encoding="utf-8"))
        return "chosen setting", Sampling("chosen setting", Way(**stored["way"]), stored["source"])

    def _choose(self, task: plan.Choice, file: Path) -> None:
        """The best on validation clips by PSNR on moving pixels, the smaller work first among equals."""
        clips = self.clips("exact" if METHODS[task.method].data == "exact" else "pairs", "val")
        opened = lru_cache(lambda source: self.rollouts(task.method, task.seed, source, clips))
        tried: list[dict[str, Any]] = []
        for source, way in self._tries(task.method):
            video, _ = opened(source).video(way)
            value = float(np.nanmean(metrics.psnr_moving(video, clips.real)))
            setting = {"w": way.w, "sim_steps": way.sim_steps, "real_steps": way.real_steps}
            tried.append({"way": setting, "source": source, "psnr_moving": round(value, 4)})
        best = max(tried, key=lambda row: float(row["psnr_moving"]))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(best | {"tried": tried}, indent=1) + "\n")

    def _tries(self, method: str) -> list[tuple[Source, Way]]:
        plain: list[tuple[Source, Way]] = [
            ("student", replace(plan.PLAIN, real_steps=n)) for n in self.sizes.tried_steps
        ]
        if METHODS[method].preset not in ("full", "no-distillation"):
            return plain
        sources: tuple[Source, ...] = ("student", "teacher")
        return plain + [
            (source, replace(PAPER, w=w, real_steps=n))
            for source in sources
            for w in (0.6, 1.0)
            for n in self.sizes.tried_steps
        ]

    def _sweep(self, task: plan.SweepCell) -> None:
        if task.sweep not in self._benches:
            models = [plan.model_of(*m) for m in plan.checkpoints_of(self.sizes, task.sweep)]
            self._benches[task.sweep] = Bench(
                open_model=lambda i: self.predictor(models[i]),
                simulator=lambda predictor: predictor,
                clips=self.clips("pairs", "test"),
                wanted=lambda predictor: self._wanted((), self.sizes.repeats),
                names=models,
                simulation="student",
                split_sha256=split_hash(self._latents("many") / "split.json"),
            )
        bench = self._benches[task.sweep]
        name, blind = bench.names[task.cell.checkpoint], task.cell.setting.retention == 0
        if blind and not is_blind(bench.open_model(task.cell.checkpoint).model):
            raise SimForcingError(f"{name} was trained with p = 0, yet it sees simulation")
        bench.run(task.cell, self.out / "sweeps" / task.sweep)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """With seconds of the processor."""
    began = time.process_time()
    return work(), time.process_time() - began


def describe(sizes: Sizes) -> dict[str, object]:
    """What defines a study's folder."""
    return {"command": "study", "sizes": asdict(sizes), "world": asdict(WorldConfig()), "exact": asdict(EXACT)}
