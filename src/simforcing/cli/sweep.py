"""`simforcing sweep`: guidance weight against retention, and sampling steps against quality and latency."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from simforcing.cli.evaluate import NetworkOptions
from simforcing.cli.sampling import check_dataset
from simforcing.errors import SimForcingError, check_seed

if TYPE_CHECKING:
    from simforcing.data.episode import Dataset
    from simforcing.evaluate.measure import Wanted
    from simforcing.evaluate.sweep import Bench, Cell, Kind, Plan, Sweep
    from simforcing.predict.predictor import Predictor

Weights = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class SweepOptions(NetworkOptions):
    """What both sweeps share."""

    data: Path
    """Paired dataset."""
    split: Path
    """Split file that `encode` wrote."""
    out: Path
    """Folder of the sweep; one that was stopped goes on, one of other settings is refused."""
    part: Literal["val", "test"] = "val"
    """Which episodes of the split: choose settings on 'val', and look at 'test' once."""
    per_episode: int = 1
    """Windows of each episode."""
    simulation: Literal["predicted", "rendered"] = "predicted"
    """Where the simulation comes from: the model itself (or --sim-model), or the dataset's rendered replay."""
    sim_model: str | None = None
    """Another model to predict the simulation, such as the teacher."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the noise; every cell is repeated with each."""
    latency_repeats: int = 3
    """Times that a cell's stages are timed on one clip."""
    engine: Literal["here", "ray"] = "here"
    """Cells one after another, or spread over Ray's workers (`pip install ray`); times are then of a busy machine."""
    workers: int = 2
    """Of Ray."""
    keep_open: int = 4
    """Checkpoints that stay in memory; cells come in random order, so fewer than there are means opening them again."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one."""

    def __post_init__(self) -> None:
        for seed in self.seeds:
            check_seed(seed, "--seeds")

    def sweep(self, kind: "Kind", checkpoints: Sequence[str], cells: "tuple[Cell, ...]") -> int:
        """Measures what is missing, prints the best setting."""
        from simforcing.cli.show import progress
        from simforcing.evaluate import sweep as s
        from simforcing.train.checkpoint import claim_run

        if not cells:
            raise SimForcingError("the sweep has no cells; give at least one value of everything")
        self.find_networks()
        bench = self.bench(checkpoints)
        if bench.clips.short:
            print(bench.clips.left_out)
        blind = frozenset(i for i in range(len(checkpoints)) if s.is_blind(bench.open_model(i).model))
        plan = s.Plan(kind, cells, blind)
        claim_run(self.out, self._definition(plan, checkpoints, bench))
        s.begin(self.out, plan, {"checkpoints": list(checkpoints), "simulation": bench.simulation, "part": self.part})
        waiting = s.missing(self.out, plan)
        done = len(plan.work()) - len(waiting)
        print(f"{len(plan.settings)} settings, {len(cells)} cells, {done + len(waiting)} different, {done} there")
        with progress() as report:
            for cell in self._run(bench, checkpoints, waiting):
                done += 1
                report("sweep", done / (len(plan.work())), str(cell.setting))
        _show(s.Sweep.load(self.out, allow=("code", "machine")))
        return 0

    def _run(self, bench: "Bench", checkpoints: Sequence[str], cells: "list[Cell]") -> "Iterator[Cell]":
        from simforcing.evaluate import sweep as s

        if self.engine == "ray" and cells:
            out = self.out.resolve()
            return s.run_on_ray(lambda: self.bench(checkpoints), out, cells, self.workers)
        return s.run_here(bench, self.out, cells)

    def bench(self, checkpoints: Sequence[str]) -> "Bench":
        """What measures cells, here or in a worker."""
        from functools import lru_cache

        from simforcing.data import open_dataset
        from simforcing.evaluate.clips import evaluation_clips, held_out
        from simforcing.evaluate.measure import Wanted, split_hash
        from simforcing.evaluate.sweep import Bench

        dataset = open_dataset(self.data)

        @lru_cache(maxsize=self.keep_open + 1)
        def opened(source: str) -> "Predictor":
            return self._open(source, dataset)

        def simulator(predictor: "Predictor") -> "Predictor | None":
            if self.simulation == "rendered":
                return None
            return predictor if self.sim_model is None else opened(self.sim_model)

        def wanted(predictor: "Predictor") -> "Wanted":
            return Wanted(self.perceptual(predictor), changes=(), repeats=self.latency_repeats)

        rule = opened(checkpoints[0]).preparation.rule
        clips = evaluation_clips(dataset, rule, held_out(dataset, self.split, self.part), self.per_episode)
        source = "rendered" if self.simulation == "rendered" else self.sim_model or "predicted"
        return Bench(
            lambda i: opened(checkpoints[i]),
            simulator,
            clips,
            wanted,
            checkpoints,
            source,
            split_hash(self.split),
            self.keep_open,
        )

    def _open(self, source: str, dataset: "Dataset") -> "Predictor":
        from simforcing.model.device import pick_device
        from simforcing.model.world_model import WorldModel
        from simforcing.predict.predictor import Predictor

        predictor = Predictor(WorldModel.from_pretrained(source).to(pick_device(self.device)))
        check_dataset(predictor, dataset, source)
        return predictor

    def _definition(self, plan: "Plan", checkpoints: Sequence[str], bench: "Bench") -> dict[str, Any]:
        """What makes another sweep of it; the engine and the number of workers do not."""
        from simforcing.evaluate.measure import weights_hash
        from simforcing.evaluate.protocol import hash_clips

        named = self.simulation == "predicted" and self.sim_model is not None
        other = bench.simulator(bench.open_model(0)) if named else None
        simulator = None if other is None else weights_hash(other.model)
        weights = [weights_hash(bench.open_model(i).model) for i in range(len(checkpoints))]
        return {
            "command": f"sweep {plan.kind}",
            "cells": [asdict(cell) for cell in plan.cells],
            "weights": weights,
            "split": bench.split_sha256,
            "clips": hash_clips(bench.clips.window_names()),
            "simulation": bench.simulation if simulator is None else f"model {simulator}",
        }


@dataclass(frozen=True)
class SweepGuidance(SweepOptions):
    """Quality and latency against the guidance weight w, over checkpoints trained with several retentions p.

    Each cell is measured once and kept; a second call goes on where the first stopped. With w = 0, and at p = 0, no
    simulation is needed and none is predicted.

    Example:
      simforcing sweep guidance 0=runs/p0/model 0.3=runs/p3/model 0.7=runs/p7/model 1=runs/p10/model \\
          --data data/pairs --split runs/latents/split.json --out runs/guidance --seeds 0 1 2
    """

    checkpoints: Annotated[tuple[str, ...], tyro.conf.Positional]
    """P=MODEL each; a P given twice is another training with it."""
    w: Weights = (0.0, 0.3, 0.6, 1.0)
    """Guidance weights."""
    sim_steps: int = 1
    """Sampling steps of the simulation stage."""
    real_steps: int = 10
    """Sampling steps of the real stage."""

    def run(self) -> int:
        """Sweeps."""
        from simforcing.evaluate.sweep import guidance_plan

        retentions, models = [], []
        for given in self.checkpoints:
            p, _, model = given.partition("=")
            try:
                retentions.append(float(p))
            except ValueError:
                raise SimForcingError(f"checkpoint {given}: give P=MODEL, e.g. 0.7=runs/student/model") from None
            models.append(model)
        return self.sweep(
            "guidance", models, guidance_plan(retentions, self.w, self.sim_steps, self.real_steps, self.seeds)
        )


@dataclass(frozen=True)
class SweepSteps(SweepOptions):
    """Quality and latency of each stage against the steps of both stages and the guidance weight w.

    Each cell is measured once and kept; a second call goes on where the first stopped. With w = 0 the simulation's
    steps do not matter, so those cells share one measurement.

    Example:
      simforcing sweep steps runs/student/model --data data/pairs --split runs/latents/split.json --out runs/steps
    """

    checkpoints: Annotated[tuple[str, ...], tyro.conf.Positional]
    """The model; several are repeated trainings of it."""
    sim_steps: tuple[int, ...] = (1, 5, 10, 20)
    """Sampling steps of the simulation stage."""
    real_steps: tuple[int, ...] = (1, 5, 10, 20)
    """Sampling steps of the real stage."""
    w: Weights = (0.0, 0.3, 0.6, 1.0)
    """Guidance weights."""

    def run(self) -> int:
        """Sweeps."""
        from simforcing.evaluate.sweep import steps_plan

        cells = steps_plan(len(self.checkpoints), self.sim_steps, self.real_steps, self.w, self.seeds)
        return self.sweep("steps", list(self.checkpoints), cells)


def _show(found: "Sweep") -> None:
    """The best settings, and in what the cells were not measured alike."""
    from simforcing.evaluate.metrics import METRICS
    from simforcing.evaluate.report.wording import seconds, with_interval

    for key in ("psnr", "psnr_moving", "ssim", "lpips_alex", "fvd"):
        best = found.best(key)
        if best is not None:
            metric = METRICS[key]
            value = with_interval(best.metrics[key], metric.digits, metric.unit)
            took = "" if best.latency != best.latency else f", {seconds(best.latency)} s a clip"
            print(f"{metric.label}: best {value} at {best.setting}{took}")
    for note in found.notes:
        print(note)
