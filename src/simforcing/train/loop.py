"""The training loop of teacher, student and baselines: one process, any device, resumes from its directory.

Every draw follows from (seed, step), so a step can be computed again alone and a resumed run equals an uninterrupted
one. A run's length is a number of steps, or of seconds spent in steps where methods are compared at equal time; the
learning rate follows the share of it that has passed.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from simforcing.errors import SimForcingError
from simforcing.model.world_model import WorldModel
from simforcing.train.batches import LatentClips
from simforcing.train.checkpoint import Progress, append_row, cut_log, resume, save_checkpoint
from simforcing.train.objective import Batch

Loss = Callable[[WorldModel, Batch, torch.Generator], dict[str, Tensor]]
MAX_BAD_STEPS = 10
FIRST_RATE = 0.01  # share of lr at which the warm-up of a run in seconds begins


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation. Defaults are the paper's, save for weight decay on norms, biases and modulations: none.

    Exactly one of `steps` and `seconds` is given.
    """

    steps: int | None = None
    seconds: float | None = None
    batch_size: int = 16
    lr: float = 1e-4
    sim_lr_scale: float = 1.0  # of the projections that start at zero
    warmup: float = 0.05  # share of the run
    final_lr: float = 0.01  # share of lr
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    log_every: int = 20
    checkpoint_seconds: float = 60.0
    validate_seconds: float = 60.0

    def __post_init__(self) -> None:
        lengths = [length for length in (self.steps, self.seconds) if length is not None]
        if len(lengths) != 1 or not lengths[0] > 0:
            raise SimForcingError("a run's length is either steps or seconds: give exactly one, above zero")
        if self.batch_size < 1:
            raise SimForcingError(f"batch size {self.batch_size}: a step needs at least one clip")
        if not 0 < self.lr < math.inf:
            raise SimForcingError(f"learning rate {self.lr}: give a number above zero")
        if not 0 <= self.warmup < 1:
            raise SimForcingError(f"warmup {self.warmup}: a share of the run, at least 0 and below 1")

    def passed(self, progress: Progress) -> float:
        """Share of the run that is done, in [0, 1]."""
        done = progress.step / self.steps if self.steps else progress.seconds / (self.seconds or math.inf)
        return min(done, 1.0)

    def rate(self, progress: Progress) -> float:
        """Learning rate of the next step as a share of `lr`: linear warm-up, then cosine to `final_lr`.

        In a run of steps the warm-up takes W = floor(warmup * steps) of them and begins at 1 / W, the released
        schedule; in a run of seconds it begins at `FIRST_RATE`.
        """
        if self.steps is not None:
            up, done = int(self.warmup * self.steps) / self.steps, progress.step / self.steps
            first = 1 / max(up * self.steps, 1)
        else:
            up, done, first = self.warmup, self.passed(progress), FIRST_RATE
        if done < up:
            return first + (1 - first) * done / up
        down = min((done - up) / (1 - up), 1.0)
        return self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * down))


def make_optimizer(model: WorldModel, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay; norms, biases and modulations do not; what gets no gradient is frozen and left out."""
    for _, parameter in model.unused_parameters():
        parameter.requires_grad_(False)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = config.weight_decay if parameter.ndim > 1 and "scale_shift_table" not in name else 0.0
            scale = config.sim_lr_scale if name.startswith("sim.") else 1.0
            groups.setdefault((decay, scale), []).append(parameter)
    described = [{"params": p, "weight_decay": d, "scale": s} for (d, s), p in groups.items()]
    return torch.optim.AdamW(described, lr=config.lr, betas=config.betas, eps=1e-8, fused=True)


@dataclass
class Run:
    """What a training run is made of."""

    model: WorldModel
    clips: LatentClips
    loss: Loss
    config: TrainConfig
    out: Path
    validate: Callable[[WorldModel], dict[str, float]] | None = None
    report: Callable[[float, dict[str, Any]], None] = lambda passed, row: None


def step_generator(seed: int, step: int) -> torch.Generator:
    """The randomness of one step, whatever came before it. (A CPU generator looks at 32 bits of its seed only.)"""
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, step]).generate_state(1)[0]))


def train(run: Run) -> Progress:
    """Trains to the end of the run, from its newest checkpoint if there is one; the last checkpoint is the result.

    Raises:
        SimForcingError: a checkpoint or the log cannot be written, or ten steps in a row had no finite loss
            (names the clips).
    """
    config, model = run.config, run.model
    optimizer = make_optimizer(model, config)
    progress = resume(run.out, model, optimizer)
    cut_log(run.out / "log.jsonl", progress.step)
    if progress.step and config.passed(progress) >= 1:
        return progress
    saved = validated = progress.seconds

    def write(row: dict[str, Any]) -> None:
        append_row(run.out / "log.jsonl", row)
        run.report(config.passed(progress), row)

    for row in _steps(run, optimizer, progress):
        if row is not None:
            write(row)
        if run.validate and progress.seconds - validated > config.validate_seconds:
            validated = progress.seconds
            write({"step": progress.step, "seconds": round(progress.seconds, 3)} | _validated(run))
        if progress.seconds - saved > config.checkpoint_seconds:
            saved = progress.seconds
            save_checkpoint(run.out, model, optimizer, progress)
    if run.validate:
        write({"step": progress.step, "seconds": round(progress.seconds, 3)} | _validated(run))
    save_checkpoint(run.out, model, optimizer, progress)
    return progress


def _validated(run: Run) -> dict[str, float]:
    assert run.validate is not None
    run.model.eval()
    result = run.validate(run.model)
    run.model.train()
    return {f"val_{name}": value for name, value in result.items()}


def _steps(run: Run, optimizer: torch.optim.Optimizer, progress: Progress) -> Iterator[dict[str, Any] | None]:
    """One optimiser step each; yields a log row now and then."""
    config, model = run.config, run.model
    trainable = [p for group in optimizer.param_groups for p in group["params"]]
    model.train()
    bad = 0
    while config.passed(progress) < 1:
        began = time.perf_counter()
        lr = config.lr * config.rate(progress)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        batch = run.clips.batch(config.batch_size, config.seed, progress.step)
        terms = run.loss(model, batch, step_generator(config.seed, progress.step))
        terms["total"].backward()
        norm = nn.utils.clip_grad_norm_(trainable, config.clip)
        finite = bool(torch.isfinite(norm))
        if finite:
            optimizer.step()
            bad = 0
        else:
            bad += 1
            if bad == MAX_BAD_STEPS:
                names = run.clips.names(config.batch_size, config.seed, progress.step)
                raise SimForcingError(
                    f"{bad} steps in a row without a finite gradient; last clips: {', '.join(names[:8])}"
                )
        optimizer.zero_grad()
        progress.step += 1
        progress.seconds += time.perf_counter() - began
        due = progress.step % config.log_every == 0 or not finite
        yield _row(terms, norm, lr, progress) if due else None


def _row(terms: dict[str, Tensor], norm: Tensor, lr: float, progress: Progress) -> dict[str, Any]:
    row: dict[str, Any] = {"step": progress.step, "seconds": round(progress.seconds, 3)}
    row |= {name: round(float(value.detach()), 6) for name, value in terms.items()}
    return row | {"grad_norm": round(float(norm), 4), "lr": lr}
