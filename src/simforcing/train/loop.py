"""The training loop of world models and policies: any device, one process or many, resumes from its directory.

Every draw follows from (seed, place of a clip in the run), so a step can be computed again alone, a resumed run equals
an uninterrupted one, and it does not matter how the clips of a step are shared by processes and backward passes. No
step waits for the device: a step without a finite loss and gradient is skipped there, and noticed when it is looked at.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.model.world_model import WorldModel
from simforcing.train.batches import Clips
from simforcing.train.checkpoint import Progress, State, resume, save_checkpoint
from simforcing.train.config import TrainConfig as TrainConfig  # also imported from here
from simforcing.train.log import Clock, Log, memory_gib
from simforcing.train.optim import Average, clipped_norm, freeze_unused, make_optimizer, step_unless
from simforcing.train.parallel import Arrangement, Team, accumulating, arranged

ON_HOST = ("text_mask", "sim_text_mask", "gate")  # looked at while a step is put together


class Tensors(Protocol):
    """A batch, or what was drawn for it: a named tuple of tensors, or None where there is nothing."""

    def _asdict(self) -> dict[str, Any]: ...

    def _replace(self, *args: Any, **kwargs: Any) -> Self: ...


T = TypeVar("T", bound=Tensors)


class Loss(Protocol):
    """What a role minimises: all randomness of a batch, drawn on the host, then its loss terms, `total` among them.

    Model, batch and draws are of the kinds that belong to each other; the loop only hands them on.
    """

    @property
    def teacher(self) -> WorldModel | None:
        """A frozen model that the terms look at."""

    def draw(self, model: Any, batch: Any, generators: Sequence[torch.Generator]) -> Any:
        """The randomness of a batch, one generator a clip."""

    def __call__(self, model: Any, batch: Any, draws: Any) -> dict[str, Tensor]:
        """The terms."""


Validate = Callable[[Any], dict[str, float]]


@dataclass
class Run:
    """What a training run is made of.

    validate: losses on held-out clips, computed by all processes; the lowest `flow` is the best checkpoint.
    rollout: whatever is watched every `rollout_every` steps, called in all processes.
    report: takes the share that is done, and a row of the log.
    """

    model: WorldModel
    clips: Clips[Any]
    loss: Loss
    config: TrainConfig
    out: Path
    validate: Validate | None = None
    report: Callable[[float, dict[str, Any]], None] = lambda passed, row: None
    rollout: Callable[[int, Any], dict[str, float]] | None = None
    team: Team = field(default_factory=Team)
    arrangement: Arrangement = field(default_factory=Arrangement)
    wandb: str | None = None


class Stopped(SystemExit):
    """The run was asked to stop (SIGTERM) and did so after a step and a checkpoint; its code is that of the signal."""

    def __init__(self, step: int) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.step = step


def clip_generator(seed: int, place: int) -> torch.Generator:
    """The randomness of one clip of a run, whatever came before it.

    (A CPU generator looks at 32 bits of its seed only.)
    """
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, place]).generate_state(1)[0]))


def train(run: Run) -> Progress:
    """Trains to the end of the run, from its newest checkpoint if there is one; the last checkpoint is the result.

    With `ema`, the model that is left is the average.

    Raises:
        SimForcingError: a checkpoint or the log cannot be written, or too many steps in a row had no finite loss and
            gradient (names the clips).
        Stopped: the process got SIGTERM; a checkpoint of the last step is there.
    """
    episodes = len(run.clips.episode.unique())
    run = replace(run, config=run.config.resolved(len(run.clips), episodes, run.team.size))
    config, team = run.config, run.team
    freeze_unused(run.model)
    trained = arranged(run.model, run.loss.teacher, team, run.arrangement)
    average = Average(run.model, config.ema) if config.ema else None
    state = State(run.model, make_optimizer(run.model, config), average.values if average else None)
    progress = resume(run.out, state, team)
    if not (progress.step and config.passed(progress) >= 1):
        _to_the_end(run, trained, state, average)
    if average:
        average.exchange()
    return state.progress


def _to_the_end(run: Run, trained: torch.nn.Module, state: State, average: Average | None) -> None:
    config, team, progress = run.config, run.team, state.progress
    log = Log(run.out, progress.step, team.main, run.wandb)
    saved = validated = progress.seconds

    def write(row: dict[str, Any]) -> None:
        log.write({"step": progress.step, "seconds": round(progress.seconds, 3)} | row)
        run.report(config.passed(progress), {"step": progress.step} | row)

    def save() -> None:
        nonlocal saved
        saved = progress.seconds
        save_checkpoint(run.out, state, team, config.keep)

    def validate(look: Validate) -> None:
        nonlocal validated
        validated = progress.seconds
        found = _watched(run, average, look)
        write({f"val_{name}": value for name, value in found.items()})
        if found.get("flow", math.nan) < (math.inf if progress.best is None else progress.best):
            progress.best, progress.best_step = found["flow"], progress.step
            save()

    with sigterm_noticed() as stop, closing(_steps(run, trained, state, average, stop)) as steps:
        for row in steps:
            if row is not None:
                write(row)
            if run.validate and progress.seconds - validated > config.validate_seconds:
                validate(run.validate)
            if run.rollout and config.rollout_every and progress.step % config.rollout_every == 0:
                write(_watched(run, average, partial(run.rollout, progress.step)))
            if progress.seconds - saved > config.checkpoint_seconds and config.passed(progress) < 1:
                save()
            if stop.agreed:
                save()
                raise Stopped(progress.step)
        if run.validate:
            validate(run.validate)
        save()


def _watched(run: Run, average: Average | None, look: Validate) -> dict[str, float]:
    """What `look` finds in the model, or in its average."""
    applied: AbstractContextManager[None] = average.applied() if average else nullcontext()
    run.model.eval()
    with applied, torch.no_grad():
        result = look(run.model)
    run.model.train()
    return result


@dataclass
class Stop:
    """Whether this process was asked to stop, and whether all know of one that was."""

    asked: bool = False
    agreed: bool = False

    def ask(self, *signal_and_frame: Any) -> None:
        """Handles a signal."""
        self.asked = True


@contextmanager
def sigterm_noticed() -> Iterator[Stop]:
    """Inside, SIGTERM asks to stop, and does nothing else. (In other threads than the main one it is not seen.)"""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, stop.ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


# -- steps ----------------------------------------------------------------------------------------------------------


def _steps(
    run: Run, trained: torch.nn.Module, state: State, average: Average | None, stop: Stop
) -> Generator[dict[str, Any] | None]:
    """One optimiser step each; yields a row for the log now and then."""
    config, team, progress = run.config, run.team, state.progress
    assert isinstance(state.optimizer, torch.optim.AdamW)
    clock, skips = Clock(team.device), Skips(run, progress)
    first = progress.step * config.accumulate
    loader = run.clips.batches(config.batch_size, config.seed, first, team.rank, team.size)
    batches = cast(Generator[Tensors], loader)
    run.model.train()
    since, steps = time.perf_counter(), 0
    with closing(batches):
        while config.passed(progress) < 1:
            began = time.perf_counter()
            clock.start()
            lr = config.lr * config.rate(progress)
            for group in state.optimizer.param_groups:
                group["lr"] = lr * group["scale"]
            terms = _gradients(run, trained, batches, progress.step, clock)
            norm = clipped_norm(state.optimizer, config.clip)
            bad = ~(torch.isfinite(norm) & torch.isfinite(terms["total"]))
            step_unless(bad, state.optimizer)
            if average:
                average.update()
            clock.mark("optimizer")
            progress.step, steps = progress.step + 1, steps + 1
            skips.add(progress.step, bad)
            due = progress.step % config.log_every == 0
            noticed = skips.noticed() if due or team.device.type == "cpu" else {}
            spent = progress.seconds + time.perf_counter() - began
            progress.seconds, stop.agreed = team.agreed(spent, stop.asked)
            if not (due or noticed):
                yield None
                continue
            row = noticed | {name: round(float(value), 6) for name, value in terms.items()}
            row |= {"grad_norm": round(float(norm), 4), "lr": lr, "memory_gib": memory_gib(team.device)}
            now = time.perf_counter()
            row |= clock.read(steps) | {"steps_per_second": float(f"{steps / max(now - since, 1e-9):.4g}")}
            since, steps = now, 0
            yield row
        skips.noticed()


def _gradients(
    run: Run, trained: torch.nn.Module, batches: Iterator[Tensors], step: int, clock: Clock
) -> dict[str, Tensor]:
    """Gradients of one step, from `accumulate` backward passes; its terms, means over all processes and passes."""
    config, team, loss = run.config, run.team, run.loss
    found: list[dict[str, Tensor]] = []
    for turn in range(config.accumulate):
        places = places_of(config, step * config.accumulate + turn, team)
        host = next(batches)
        draws = loss.draw(run.model, host, [clip_generator(config.seed, place) for place in places])
        batch, draws = moved(host, team.device), moved(draws, team.device)
        clock.mark("data")
        with accumulating(trained, last=turn + 1 == config.accumulate):
            terms = trained(lambda model, batch=batch, draws=draws: loss(model, batch, draws))
            clock.mark("forward")
            (terms["total"] / config.accumulate).backward()
        clock.mark("backward")
        found.append({name: value.detach() for name, value in terms.items()})
    names = list(found[0])
    means = torch.stack([torch.stack([terms[name] for terms in found]).mean() for name in names])
    return dict(zip(names, team.mean(means).unbind(), strict=True))


def places_of(config: TrainConfig, number: int, team: Team) -> range:
    """Places in the run of the clips of batch `number` that are this process's."""
    together = config.batch_size * team.size
    return range(number * together, (number + 1) * together)[team.rank :: team.size]


def moved(values: T, device: torch.device) -> T:
    """Tensors on the device, copied without waiting; what must stay on the host stays."""
    if device.type == "cpu":
        return values
    given = {k: v for k, v in values._asdict().items() if v is not None and k not in ON_HOST}
    return values._replace(**{k: v.pin_memory().to(device, non_blocking=True) for k, v in given.items()})


class Skips:
    """Steps that were skipped: counted and named when somebody looks."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self._run, self._progress = run, progress
        self._unseen: list[tuple[int, Tensor]] = []

    def add(self, step: int, bad: Tensor) -> None:
        """One step's flag, which stays on the device."""
        self._unseen.append((step, bad))

    def noticed(self) -> dict[str, Any]:
        """Looks at the flags since the last look; of skipped steps, the number so far and the clips of the last.

        Raises:
            SimForcingError: too many in a row.
        """
        row: dict[str, Any] = {}
        flags: list[bool] = torch.stack([bad for _, bad in self._unseen]).tolist() if self._unseen else []
        for (step, _), bad in zip(self._unseen, flags, strict=True):
            self._progress.skipped_in_row = self._progress.skipped_in_row + 1 if bad else 0
            self._progress.skipped += bad
            if bad:
                row = {"skipped": self._progress.skipped, "skipped_step": step, "skipped_clips": self._clips(step)}
            if self._progress.skipped_in_row == self._run.config.max_skipped:
                raise SimForcingError(
                    f"{self._run.config.max_skipped} steps in a row without a finite loss and gradient; last clips: "
                    f"{', '.join(self._clips(step)[:8])}"
                )
        self._unseen.clear()
        return row

    def _clips(self, step: int) -> list[str]:
        """Of all processes."""
        config, size = self._run.config, self._run.team.size
        first = (step - 1) * config.accumulate
        numbers = range(first, first + config.accumulate)
        return [name for n in numbers for name in self._run.clips.names(config.batch_size * size, config.seed, n)]
