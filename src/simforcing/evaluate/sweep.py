"""Sweeps: many settings on the same clips, cell by cell, in random order, each measured once.

A cell is a checkpoint under one guidance weight, numbers of steps and seed. Cells that must give the same video share
one measurement: with w = 0 the simulation is not looked at, so its steps do not matter; a checkpoint whose simulation
residuals are exactly zero (never conditioned, p = 0) does not depend on w at all. A measurement is a result file
(`results.Result`) under `cells/`; one that is there is kept, so a sweep that was stopped goes on.
"""

import json
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from simforcing.errors import SimForcingError
from simforcing.evaluate.clips import EvaluationClips
from simforcing.evaluate.measure import Rollouts, Wanted, Way, measure
from simforcing.evaluate.metrics import METRICS
from simforcing.evaluate.protocol import check_same, mixed
from simforcing.evaluate.results import Result, bare
from simforcing.evaluate.statistics import Interval, over_seeds
from simforcing.files import write_text
from simforcing.model.world_model import WorldModel
from simforcing.predict.predictor import Predictor
from simforcing.predict.sampler import Guidance

Kind = Literal["guidance", "steps"]
FORMAT = "simforcing-sweep-1"
CELLS = "cells"
"""Folder of the measurements."""
STAGES = ("simulation stage", "real stage", "decoding")


@dataclass(frozen=True)
class Setting:
    """What a cell of the table stands for; `retention` is the p that the checkpoint was trained with."""

    retention: float | None
    w: float
    sim_steps: int
    real_steps: int

    def __post_init__(self) -> None:
        Guidance(self.w)  # refuses what is not finite

    def __str__(self) -> str:
        """`p = 0.7, w = 0.6, 1 + 10 steps`."""
        p = "" if self.retention is None else f"p = {self.retention:g}, "
        return f"{p}w = {self.w:g}, {self.sim_steps} + {self.real_steps} steps"


@dataclass(frozen=True)
class Cell:
    """A setting with one checkpoint (its index) and one seed of the noise."""

    setting: Setting
    checkpoint: int
    seed: int


@dataclass(frozen=True)
class Plan:
    """The cells of a sweep, and which measurement stands for each.

    `blind` are the checkpoints that no simulation can reach.
    """

    kind: Kind
    cells: tuple[Cell, ...]
    blind: frozenset[int] = frozenset()

    def measured_by(self, cell: Cell) -> Cell:
        """The cell that is measured for this one: the least work with the same outcome."""
        s = cell.setting
        if s.w == 0 or cell.checkpoint in self.blind:
            return replace(cell, setting=replace(s, w=0.0, sim_steps=0))
        return cell

    def work(self, seed: int = 0) -> list[Cell]:
        """Every measurement once, in random order, so that the machine's load spreads over all settings."""
        distinct = list(dict.fromkeys(self.measured_by(cell) for cell in self.cells))
        random.Random(seed).shuffle(distinct)
        return distinct

    @cached_property
    def settings(self) -> list[Setting]:
        """In the order given, each once."""
        return list(dict.fromkeys(cell.setting for cell in self.cells))


def cell_name(cell: Cell) -> str:
    """Name of a measurement's file; no two weights share one, however close they are."""
    s = cell.setting
    short = f"{s.w:g}"
    weight = short if float(short) == s.w else repr(float(s.w))
    return f"m{cell.checkpoint}-w{weight}-sim{s.sim_steps}-real{s.real_steps}-seed{cell.seed}"


def guidance_plan(
    retentions: Sequence[float], weights: Sequence[float], sim_steps: int, real_steps: int, seeds: Sequence[int]
) -> tuple[Cell, ...]:
    """Every checkpoint (trained with `retentions[i]`; repeated values are repeated trainings) under every weight."""
    return tuple(
        Cell(Setting(p, w, sim_steps, real_steps), i, seed)
        for i, p in enumerate(retentions)
        for w in weights
        for seed in seeds
    )


def steps_plan(
    checkpoints: int,
    sim_steps: Sequence[int],
    real_steps: Sequence[int],
    weights: Sequence[float],
    seeds: Sequence[int],
) -> tuple[Cell, ...]:
    """Every pair of steps under every weight; several checkpoints are repeated trainings."""
    return tuple(
        Cell(Setting(None, w, ns, nr), i, seed)
        for ns in sim_steps
        for nr in real_steps
        for w in weights
        for i in range(checkpoints)
        for seed in seeds
    )


def is_blind(model: WorldModel) -> bool:
    """Whether simulation cannot change what the model predicts: its residuals are exactly zero."""
    return model.sim is None or not any(bool(p.any()) for p in model.sim.parameters())


@dataclass
class Bench:
    """Measures cells: checkpoints are opened when they are first needed, and `keep` of them stay open.

    open_model: index of a checkpoint to its predictor; simulator: who predicts simulation for it (None: rendered).
    """

    open_model: Callable[[int], Predictor]
    simulator: Callable[[Predictor], Predictor | None]
    clips: EvaluationClips
    wanted: Callable[[Predictor], Wanted]
    names: Sequence[str]
    simulation: str
    split_sha256: str
    keep: int = 4
    _open: dict[int, tuple[Rollouts, Wanted]] = field(default_factory=dict)

    def run(self, cell: Cell, out: Path) -> Path:
        """Measures a cell and writes its result."""
        if cell.checkpoint not in self._open:
            predictor = self.open_model(cell.checkpoint)
            rollouts = Rollouts(predictor, self.clips, self.simulator(predictor))
            while len(self._open) >= max(1, self.keep):
                self._open.pop(next(iter(self._open)))
            self._open[cell.checkpoint] = (rollouts, self.wanted(predictor))
        rollouts, wanted = self._open[cell.checkpoint]
        s = cell.setting
        # What is not looked at is measured with one step, which the way then leaves out.
        way = Way(s.w, max(1, s.sim_steps), s.real_steps, seed=cell.seed)
        found = measure(
            rollouts,
            way,
            wanted,
            name=str(s),
            model=self.names[cell.checkpoint],
            simulation=self.simulation,
            split_sha256=self.split_sha256,
        )
        path = cell_file(out, cell)
        found.result.save(path)
        return path


def cell_file(out: Path, cell: Cell) -> Path:
    """Where a measurement is kept."""
    return out / CELLS / f"{cell_name(cell)}.json"


def begin(out: Path, plan: Plan, about: dict[str, Any]) -> None:
    """Writes `sweep.json`: what every cell is and which file stands for it. `about` is shown on the page."""
    cells = [{**asdict(c), "file": cell_file(out, plan.measured_by(c)).name} for c in plan.cells]
    (out / CELLS).mkdir(parents=True, exist_ok=True)
    stored = {"format": FORMAT, "kind": plan.kind, "about": about, "blind": sorted(plan.blind), "cells": cells}
    write_text(out / "sweep.json", json.dumps(stored, indent=1) + "\n")


def missing(out: Path, plan: Plan, seed: int = 0) -> list[Cell]:
    """The measurements that are still to be made, in random order."""
    return [cell for cell in plan.work(seed) if not cell_file(out, cell).exists()]


@dataclass(frozen=True)
class Outcome:
    """One setting of a sweep over all its checkpoints and seeds.

    taken: seconds of every measurement of each stage; a stage that is not needed is missing.
    runs: measurements of quality that went in.
    """

    setting: Setting
    metrics: dict[str, Interval]
    taken: dict[str, list[float]]
    runs: int

    @property
    def seconds(self) -> dict[str, float]:
        """Of each stage, the median."""
        return {stage: float(np.median(taken)) for stage, taken in self.taken.items()}

    @property
    def latency(self) -> float:
        """Seconds of one clip; nan where it was not measured."""
        return sum(self.seconds.values()) if self.taken else math.nan

    def range(self, *stages: str) -> Interval:
        """Median, fastest and slowest seconds of stages together (default all): no interval, but what was seen."""
        chosen = [taken for stage, taken in self.taken.items() if not stages or stage in stages]
        middle, low, high = (sum(float(f(taken)) for taken in chosen) for f in (np.median, np.min, np.max))
        return Interval(mean=middle, low=low, high=high, clips=min(map(len, chosen), default=0), missing=0)


@dataclass(frozen=True)
class _Stored:
    """What `begin` wrote, checked: each cell's setting and the name of its file."""

    kind: Kind
    about: dict[str, Any]
    cells: list[tuple[Setting, str]]


def _read(file: Path) -> _Stored:
    """Reads `sweep.json`.

    Raises:
        SimForcingError: it is missing, of another version or damaged.
    """
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SimForcingError(f"{file}: no sweep ({error}); make one with 'simforcing sweep'") from error
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise SimForcingError(f"{file} is no sweep of this version; sweep again")
    values: list[Any] = [stored.get(key) for key in ("kind", "about", "cells")]
    kind, about, cells = values
    named = about.get("checkpoints", []) if isinstance(about, dict) else None
    wrong = (
        "kind"
        if kind not in get_args(Kind)
        else "about"
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named)
        else "cells"
        if not isinstance(cells, list) or not cells
        else None
    )
    if wrong:
        raise SimForcingError(f"{file} is damaged: '{wrong}' is missing or of a wrong kind; sweep again")
    found = []
    for i, cell in enumerate(cells):
        try:
            setting, name = Setting(**cell["setting"]), cell["file"]
            numbers = (setting.w, setting.sim_steps, setting.real_steps, setting.retention or 0.0)
            if not isinstance(name, str) or Path(name).name != name:
                raise ValueError(f"'file' is {name!r}")
            if any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
                raise ValueError(f"'setting' is {cell['setting']}")
        except KeyError as error:
            raise SimForcingError(f"{file} is damaged: cell {i} has no {error}; sweep again") from error
        except (TypeError, ValueError) as error:
            raise SimForcingError(f"{file} is damaged: cell {i}: {error}; sweep again") from error
        found.append((setting, name))
    return _Stored(kind, about, found)


@dataclass(frozen=True)
class Sweep:
    """What a sweep has found so far: `outcomes` of the settings that are complete, out of `total`."""

    kind: Kind
    about: dict[str, Any]
    outcomes: list[Outcome]
    total: int
    results: list[Result]
    notes: list[str]

    @classmethod
    def load(cls, out: Path, allow: Collection[str] = ()) -> "Sweep":
        """Reads a sweep's folder; `notes` say in which of the allowed fields its cells were not measured alike.

        Raises:
            SimForcingError: it is none, or its cells differ in a field that is not allowed.
        """
        stored = _read(out / "sweep.json")
        results: dict[str, Result] = {}
        groups: dict[Setting, list[str]] = {}
        for setting, name in stored.cells:
            groups.setdefault(setting, []).append(name)
            path = out / CELLS / name
            if name not in results and (path.exists() or path.is_symlink()):
                results[name] = Result.load(path)
        protocols = {name: r.protocol for name, r in results.items()}
        check_same(protocols, {"seed", "guidance", "sim_steps", "real_steps", "simulation", "simulator_sha256", *allow})
        outcomes = [
            outcome(setting, [results[name] for name in names])
            for setting, names in groups.items()
            if all(name in results for name in names)
        ]
        return cls(stored.kind, stored.about, outcomes, len(groups), list(results.values()), mixed(protocols, allow))

    def best(self, key: str) -> Outcome | None:
        """The setting with the best mean of a metric."""
        having = [o for o in self.outcomes if key in o.metrics and not math.isnan(o.metrics[key]["mean"])]
        sign = METRICS[key].better or 1
        return max(having, key=lambda o: sign * o.metrics[key]["mean"], default=None)


def outcome(setting: Setting, results: Sequence[Result]) -> Outcome:
    """One setting from its measurements, a result a checkpoint and seed."""
    first = results[0]
    metrics: dict[str, Interval] = {}
    for key in METRICS:
        if all(key in r.per_clip for r in results):
            table = np.array([r.per_clip[key] for r in results], np.float64)
            metrics[key] = over_seeds(table, clusters=first.episodes)
        elif all(key in r.whole for r in results):
            metrics[key] = bare(float(np.mean([r.whole[key] for r in results])), len(first.windows))
    stages = {stage: [s for r in results for s in r.latency.get(stage, ())] for stage in STAGES}
    return Outcome(setting, metrics, {stage: taken for stage, taken in stages.items() if taken}, len(results))


def run_here(bench: Bench, out: Path, cells: Sequence[Cell]) -> Iterator[Cell]:
    """Measures cells one after another; yields each when it is written."""
    for cell in cells:
        bench.run(cell, out)
        yield cell


def run_on_ray(make: Callable[[], Bench], out: Path, cells: Sequence[Cell], workers: int) -> Iterator[Cell]:
    """Measures cells on Ray, one bench a worker; yields each when it is written. `out` is seen by all workers.

    Latencies are those of machines that work on several cells at once.

    Raises:
        SimForcingError: Ray is not installed.
    """
    try:
        import ray
        from ray.util import ActorPool
    except ModuleNotFoundError as error:
        raise SimForcingError("--engine ray: ray is not installed; pip install ray, or use --engine here") from error
    if not ray.is_initialized():
        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)

    class Worker:
        """Holds a bench for its life."""

        def __init__(self) -> None:
            self.bench = make()

        def run(self, cell: Cell) -> Cell:
            """One cell."""
            self.bench.run(cell, out)
            return cell

    try:
        pool = ActorPool([ray.remote(Worker).remote() for _ in range(min(workers, len(cells)))])
        yield from pool.map_unordered(lambda actor, cell: actor.run.remote(cell), list(cells))
    finally:
        ray.shutdown()
