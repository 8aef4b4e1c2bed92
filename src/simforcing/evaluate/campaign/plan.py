"""What the study consists of: units of work, each with the file that says that it is done.

Names: Ns, Nr sampling steps of the simulation and the real stage, w guidance weight, p retention.

A unit is the smallest thing that is lost when everything is killed. It can be done when the files that it needs are
there; which process does it, and when, changes nothing but latencies.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from simforcing.evaluate.measure import Way
from simforcing.evaluate.sweep import Cell, Plan, cell_file, guidance_plan, steps_plan

Source: TypeAlias = Literal["student", "teacher", "rendered"]

PAPER = Way(w=0.6, sim_steps=1, real_steps=10)
PLAIN = replace(PAPER, w=0.0)
RETENTIONS = {0.0: "no-conditioning", 0.3: "p0.3", 0.7: "full", 1.0: "p1"}
"""Which method was trained with each p of the guidance sweep."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything.

    sweep_seeds: of the sweep of steps. steps: of a training at equal steps. few, main, many: real episodes to train
    on. simulated: episodes for a teacher of the study. per_episode: clips of each test episode; sweeps and choices
    take one.
    """

    seeds: int = 3
    sweep_seeds: int = 2
    steps: int = 240
    teacher_steps: int = 400
    few: int = 12
    main: int = 24
    many: int = 96
    val: int = 12
    test: int = 30
    per_episode: int = 2
    simulated: int = 300
    weights: tuple[float, ...] = (0.0, 0.3, 0.6, 1.0)
    sim_steps: tuple[int, ...] = (1, 5, 10, 20)
    real_steps: tuple[int, ...] = (1, 5, 10, 20)
    tried_steps: tuple[int, ...] = (1, 3, 10)
    repeats: int = 3  # of a latency
    turns: int = 7  # of the calibration

    @classmethod
    def small(cls) -> "Sizes":
        """Everything once, in under two minutes; its numbers mean nothing."""
        return cls(
            seeds=1, sweep_seeds=1, steps=2, teacher_steps=2, few=2, main=3, many=4, val=2, test=2,
            per_episode=1, simulated=4, sim_steps=(1, 5), real_steps=(1, 10, 20), tried_steps=(1,), repeats=1, turns=1,
        )  # fmt: skip

    def steps_of(self, method: "Method") -> int:
        """Steps of a training, where it is not to be of equal time."""
        return method.times * (self.teacher_steps if method.preset == "teacher" else self.steps)

    def trained_on(self, data: str) -> int:
        """Episodes that a training on these data learns from."""
        return {"few": self.few, "many": self.many, "exact": self.main}.get(data, self.main)


@dataclass(frozen=True)
class Method:
    """A training of the study. `equal`: as many steps as all others, or the time that the full method's steps take.

    times: how many times as many steps.
    """

    label: str
    preset: str
    data: str = "main"
    teacher: str = "bundled"  # or a method
    equal: Literal["steps", "time"] = "steps"
    settings: tuple[str, ...] = ()
    times: int = 1

    @property
    def aside(self) -> bool:
        """Whether it belongs to the main comparison's surroundings: other data, or a teacher of the study."""
        return self.data != "main" or self.teacher not in ("bundled", "")


METHODS: dict[str, Method] = {
    "teacher-augmented": Method("teacher, augmented trajectories", "teacher", "augmented", ""),
    "teacher-plain": Method("teacher, scripted trajectories", "teacher", "plain", ""),
    "full": Method("full method", "full"),
    "real-only": Method("real only, from the teacher", "real-only"),
    "real-only-time": Method("real only, from the teacher, equal time", "real-only", equal="time"),
    "scratch": Method("real only, from scratch", "scratch", teacher=""),
    "scratch-time": Method("real only, from scratch, equal time", "scratch", teacher="", equal="time"),
    "joint": Method("joint, no distillation, no condition", "joint"),
    "no-distillation": Method("no distillation", "no-distillation"),
    "no-conditioning": Method("no condition", "no-conditioning"),
    "value": Method("distils values", "value"),
    "unanchored": Method("motion loss with frame 0 not anchored", "unanchored"),
    "light": Method("a tenth of the motion weight", "light"),
    "p0.3": Method("p = 0.3", "full", settings=("objective.retention=0.3",)),
    "p1": Method("p = 1", "full", settings=("objective.retention=1",)),
    "full-augmented": Method("full method, teacher with augmentation", "full", teacher="teacher-augmented"),
    "full-plain": Method("full method, teacher without augmentation", "full", teacher="teacher-plain"),
    "full-few": Method("full method, few episodes", "full", "few"),
    "real-only-few": Method("real only, few episodes, equal time", "real-only", "few", equal="time"),
    "full-few-long": Method("full method, few episodes, three times the steps", "full", "few", times=3),
    "real-only-few-long": Method(
        "real only, few episodes, three times the steps, equal time", "real-only", "few", equal="time", times=3
    ),
    "no-distillation-few-long": Method(
        "no distillation, few episodes, three times the steps", "no-distillation", "few", times=3
    ),
    "joint-few-long": Method("joint, few episodes, three times the steps", "joint", "few", times=3),
    "full-many": Method("full method, many episodes", "full", "many"),
    "real-only-many": Method("real only, many episodes, equal time", "real-only", "many", equal="time"),
    "full-exact": Method("full method, exact twin", "full", "exact"),
    "real-only-exact": Method("real only, exact twin, equal time", "real-only", "exact", equal="time"),
}
REGIMES = {
    "few": ("full-few", "real-only-few"),
    "few-long": ("full-few-long", "real-only-few-long"),
    "main": ("full", "real-only-time"),
    "many": ("full-many", "real-only-many"),
    "exact": ("full-exact", "real-only-exact"),
}
"""Pairs that are compared at settings chosen on validation clips, each for itself."""
TUNED = (*(name for pair in REGIMES.values() for name in pair), "no-distillation-few-long", "joint-few-long")
"""Methods that are measured at such settings."""


@dataclass(frozen=True)
class Sampling:
    """How a trained model is sampled, and where its simulation comes from."""

    label: str
    way: Way
    source: Source = "student"


CHOSEN = "chosen"
WAYS: dict[str, Sampling] = {
    "w0": Sampling("w = 0", PLAIN),
    "w0.6": Sampling("w = 0.6", PAPER),
    "teacher": Sampling("w = 0.6, simulation by the teacher", PAPER, "teacher"),
    "rendered": Sampling("w = 0.6, rendered simulation", PAPER, "rendered"),
    "rendered-w1": Sampling("w = 1, rendered simulation", replace(PAPER, w=1.0), "rendered"),
    "soft": Sampling("soft gate at 0.6", replace(PAPER, kind="soft")),
    "midpoint": Sampling("w = 0.6, 5 midpoint steps", replace(PAPER, real_steps=5, solver="midpoint")),
    "heun": Sampling("w = 0.6, 5 Heun steps", replace(PAPER, real_steps=5, solver="heun")),
    "high-noise": Sampling("w = 0.6 at noise above 0.8", replace(PAPER, noise=(0.8, 1.0))),
    "low-noise": Sampling("w = 0.6 at noise below 0.8", replace(PAPER, noise=(0.0, 0.8))),
    "exchanged": Sampling("exchanged actions", replace(PAPER, control="exchanged-actions")),
    "other": Sampling("another clip's simulation", replace(PAPER, control="other-simulation")),
    "corrupted": Sampling("corrupted simulation", replace(PAPER, control="corrupted-simulation")),
    "copy": Sampling("copy of the first frame", replace(PLAIN, control="copy")),
    "codec": Sampling("codec ceiling", replace(PLAIN, control="codec")),
}
NO_MODEL = ("copy", "codec")
ACTIONS = ("w0", "w0.6", "rendered")
"""Ways for which the action ratio is measured, too."""
_CONDITIONED = ("w0", "w0.6")
MEASURED: dict[str, tuple[str, ...]] = {
    "full": tuple(way for way in WAYS if way not in NO_MODEL),
    "no-distillation": (*_CONDITIONED, "rendered"),
    **dict.fromkeys(("value", "unanchored", "light", "full-augmented", "full-plain"), ("w0.6",)),
    **dict.fromkeys(("real-only", "real-only-time", "scratch", "scratch-time", "joint", "no-conditioning"), ("w0",)),
}
"""Ways in which each method is measured on the test clips."""


def reference(method: str, way: str) -> str:
    """How claims and files call a method under a way."""
    return f"{method}@{way}"


# -- units ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSet:
    """Episodes drawn, encoded and divided; `few` and `main` are parts of `many`."""

    name: str


@dataclass(frozen=True)
class Calibration:
    """Steps that take equal time, decided once, and how fast this machine is."""


@dataclass(frozen=True)
class Training:
    """A method with a seed."""

    method: str
    seed: int


@dataclass(frozen=True)
class Choice:
    """The way in which a trained model is best sampled, chosen on validation clips."""

    method: str
    seed: int


@dataclass(frozen=True)
class Measurement:
    """A trained model under a way, on the test clips."""

    method: str
    way: str
    seed: int

    @property
    def clips(self) -> str:
        """Which world its test clips are of."""
        return "exact" if METHODS[self.method].data == "exact" else "pairs"


@dataclass(frozen=True)
class SweepCell:
    """A measurement of one of the sweeps."""

    sweep: Literal["guidance", "steps"]
    cell: Cell


Task: TypeAlias = DataSet | Calibration | Training | Choice | Measurement | SweepCell


@dataclass(frozen=True)
class Unit:
    """A piece of work: `file` exists when it is done, and can be made when those of `needs` exist (below OUT)."""

    task: Task
    file: str
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The file, which names the unit."""
        return self.file


CALIBRATION = "calibration.json"
SWEEPS: tuple[Literal["guidance", "steps"], ...] = ("guidance", "steps")


def data_file(name: str) -> str:
    """What exists when data are encoded and divided."""
    return f"latents/{name}/split.json"


def run_of(method: str, seed: int) -> str:
    """Directory of a training."""
    return f"runs/{method}-{seed}"


def model_of(method: str, seed: int) -> str:
    """Directory of its model."""
    return f"{run_of(method, seed)}/model"


def result_file(task: Measurement) -> str:
    """File of a measurement."""
    return f"results/{task.clips}/{reference(task.method, task.way)}-{task.seed}.json"


def choice_file(method: str, seed: int) -> str:
    """File of a choice."""
    return f"choices/{method}-{seed}.json"


def sweep_plan(sizes: Sizes, sweep: str) -> Plan:
    """The cells of a sweep. Checkpoints: of the guidance sweep every p with every seed, of the other the full method's.

    A method that never saw simulation (p = 0) has residuals of exactly zero.
    """
    if sweep == "steps":
        seeds = min(sizes.sweep_seeds, sizes.seeds)
        return Plan("steps", steps_plan(seeds, sizes.sim_steps, sizes.real_steps, sizes.weights, (0,)))
    retentions = [p for p in RETENTIONS for _ in range(sizes.seeds)]
    cells = guidance_plan(retentions, sizes.weights, PAPER.sim_steps, PAPER.real_steps, (0,))
    return Plan("guidance", cells, frozenset(i for i, p in enumerate(retentions) if p == 0))


def checkpoints_of(sizes: Sizes, sweep: str) -> list[tuple[str, int]]:
    """Method and seed of each checkpoint of a sweep."""
    if sweep == "steps":
        return [("full", seed) for seed in range(min(sizes.sweep_seeds, sizes.seeds))]
    return [(method, seed) for method in RETENTIONS.values() for seed in range(sizes.seeds)]


def units(sizes: Sizes) -> list[Unit]:
    """All of the study, in the order in which it is begun: the main comparison seed by seed, sweeps, then the rest."""
    found = [Unit(DataSet(name), data_file(name)) for name in ("many", "augmented", "plain", "exact")]
    found += [Unit(DataSet(name), data_file(name), (data_file("many"),)) for name in ("main", "few")]
    found.append(Unit(Calibration(), CALIBRATION, (data_file("main"), data_file("augmented"))))
    found += [Unit(m, result_file(m), (data_file("many"),)) for m in (Measurement("full", w, 0) for w in NO_MODEL)]
    for seed in range(sizes.seeds):
        found += _of_seed(seed, aside=False)
    for sweep in SWEEPS:
        found += _cells(sizes, sweep)
    for seed in range(sizes.seeds):
        found += _of_seed(seed, aside=True)
    return found


def _of_seed(seed: int, aside: bool) -> Iterator[Unit]:
    """Trainings and what is measured of them."""
    methods = [name for name, method in METHODS.items() if method.aside == aside]
    yield from (_training(name, seed) for name in methods)
    for name in methods:
        yield from _measurements(name, seed)


def _training(method: str, seed: int) -> Unit:
    chosen = METHODS[method]
    needs = [data_file(chosen.data)]
    needs += [CALIBRATION] if chosen.equal == "time" else []
    needs += [model_of(chosen.teacher, seed)] if chosen.teacher in METHODS else []
    return Unit(Training(method, seed), model_of(method, seed), tuple(needs))


def _measurements(method: str, seed: int) -> Iterator[Unit]:
    for way in MEASURED.get(method, ()):
        task = Measurement(method, way, seed)
        yield Unit(task, result_file(task), (model_of(method, seed), data_file("many")))
    if method in TUNED:
        chosen, task = choice_file(method, seed), Measurement(method, CHOSEN, seed)
        yield Unit(Choice(method, seed), chosen, (model_of(method, seed),))
        yield Unit(task, result_file(task), (chosen,))


def _cells(sizes: Sizes, sweep: Literal["guidance", "steps"]) -> Iterator[Unit]:
    models = checkpoints_of(sizes, sweep)
    for cell in sweep_plan(sizes, sweep).work():
        file = cell_file(Path("sweeps", sweep), cell).as_posix()
        yield Unit(SweepCell(sweep, cell), file, (model_of(*models[cell.checkpoint]), data_file("many")))
