"""How long things take on this machine, measured once: steps of equal time, and what a study will need.

Seconds are those of the processor on one thread, so that what else the machine does hardly counts. Kinds of training
are measured in turns, a few steps each, and compared turn by turn.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from simforcing.evaluate.campaign import plan
from simforcing.evaluate.campaign.plan import METHODS, WAYS, Sizes, Unit
from simforcing.evaluate.measure import Way
from simforcing.files import write_text
from simforcing.model.world_model import WorldModel
from simforcing.train.batches import LatentClips
from simforcing.train.config import TrainConfig
from simforcing.train.loop import clip_generator
from simforcing.train.optim import clipped_norm, freeze_unused, make_optimizer
from simforcing.train.roles import Objective

WARM, TURN_STEPS = 2, 8


@dataclass(frozen=True)
class Speed:
    """Seconds on one thread: of a step of each role, a forward, decoding and scoring a clip, and of data.

    The defaults are those of a core of an AMD EPYC of 2023; `calibration.json` holds those of the machine at hand.
    """

    baseline: float = 0.26
    student: float = 0.40
    teacher: float = 0.44
    forward: float = 0.008  # of one clip, one branch
    clip: float = 0.06  # decoding and scoring
    drawn: float = 1.0  # an episode of both views
    simulated: float = 0.2  # an episode of the simulation alone
    encoded: float = 0.08  # a window of both views
    validated: float = 12.0  # the end of a training: validation, checkpoint, opening the data
    ratio: float = 1.55  # of a student's step to a baseline's, turn by turn

    def equal_time(self, steps: int) -> int:
        """Steps of a baseline that take as long as these of the full method."""
        return max(1, round(steps * self.ratio))

    def save(self, file: Path) -> None:
        """Writes it, once."""
        write_text(file, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> "Speed":
        """What was measured, or the defaults."""
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else cls()


@dataclass
class Kind:
    """A kind of training that is timed."""

    model: WorldModel
    loss: Objective
    clips: LatentClips
    config: TrainConfig

    def steps(self, first: int, count: int) -> float:
        """Seconds of one of `count` optimiser steps."""
        if first == 0:
            freeze_unused(self.model)
            self._optimizer = make_optimizer(self.model, self.config)
        began = time.process_time()
        for step in range(first, first + count):
            batch = self.clips.batch(self.config.batch_size, 0, step)
            places = range(step * self.config.batch_size, (step + 1) * self.config.batch_size)
            draws = self.loss.draw(self.model, batch, [clip_generator(0, place) for place in places])
            self.loss(self.model, batch, draws)["total"].backward()
            clipped_norm(self._optimizer, self.config.clip)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return (time.process_time() - began) / count


def step_seconds(kinds: Mapping[str, Kind], turns: int) -> dict[str, list[float]]:
    """Seconds of a step of each kind, a value a turn; the kinds take turns, after `WARM` steps that are not counted."""
    torch.set_num_threads(1)
    for kind in kinds.values():
        kind.steps(0, WARM)
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(turns):
        for name, kind in kinds.items():
            found[name].append(kind.steps(WARM + turn * TURN_STEPS, TURN_STEPS))
    return found


def ratio(found: Mapping[str, list[float]], a: str = "student", b: str = "baseline") -> float:
    """Median over turns of a's seconds over b's."""
    return median(x / y for x, y in zip(found[a], found[b], strict=True))


# -- what a study will take -----------------------------------------------------------------------------------------


def seconds_of(unit: Unit, sizes: Sizes, speed: Speed, windows: int = 6) -> float:
    """About how long a unit takes on one thread. `windows`: of an episode."""
    task = unit.task
    if isinstance(task, plan.DataSet):
        return _of_data(task.name, sizes, speed, windows)
    if isinstance(task, plan.Training):
        method = METHODS[task.method]
        role = {"teacher": "teacher", "real-only": "baseline", "scratch": "baseline"}.get(method.preset, "student")
        steps = sizes.steps_of(method)
        steps = speed.equal_time(steps) if method.equal == "time" else steps
        return speed.validated + steps * float(getattr(speed, role))
    clips = sizes.test * sizes.per_episode
    if isinstance(task, plan.Choice):
        ways, weights = (5, 1.4) if METHODS[task.method].preset == "full" else (1, 1.0)
        tries = ways * len(sizes.tried_steps)
        looks = weights * sum(sizes.tried_steps) * ways
        return sizes.val * (tries * speed.clip + looks * speed.forward)
    if isinstance(task, plan.Measurement):
        way = WAYS[task.way].way if task.way in WAYS else plan.PAPER
        twice = 2 if task.way in plan.ACTIONS else 1
        return clips * (speed.clip + twice * _looks(way) * speed.forward)
    if isinstance(task, plan.SweepCell):
        setting = task.cell.setting
        way = Way(setting.w, max(1, setting.sim_steps), setting.real_steps)
        return sizes.test * (speed.clip + _looks(way) * speed.forward)
    return 60.0


def _looks(way: Way) -> int:
    """Forwards of one branch in a rollout."""
    if not way.samples:
        return 0
    return way.real_steps * len(way.guidance.branches()) + (way.sim_steps if way.simulates else 0)


def _of_data(name: str, sizes: Sizes, speed: Speed, windows: int) -> float:
    if name in ("augmented", "plain"):
        return sizes.simulated * (speed.simulated + windows * speed.encoded / 2)
    if name in ("main", "few"):
        return 1.0
    return (sizes.trained_on(name) + sizes.val + sizes.test) * (speed.drawn + windows * speed.encoded)


def minutes(units: list[Unit], sizes: Sizes, speed: Speed, workers: int) -> dict[str, tuple[int, float]]:
    """Number of units and minutes of each kind, shared by the workers; `all` together."""
    found: dict[str, tuple[int, float]] = {}
    for unit in units:
        name = type(unit.task).__name__
        count, total = found.get(name, (0, 0.0))
        found[name] = (count + 1, total + seconds_of(unit, sizes, speed) / 60 / workers)
    counts, totals = zip(*found.values(), strict=True) if found else ((0,), (0.0,))
    return found | {"all": (sum(counts), math.fsum(totals))}
