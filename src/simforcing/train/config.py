"""How long and how a run is optimised."""

import math
from dataclasses import dataclass, replace

from simforcing.errors import SimForcingError, check_seed
from simforcing.train.ranges import AT_LEAST_ONE, NOT_NEGATIVE, PERIOD, POSITIVE, SHARE, SHARE_BELOW_ONE

KEEP = 2
RANGES = {
    "steps": AT_LEAST_ONE,
    "samples_per_episode": AT_LEAST_ONE,
    "batch_size": AT_LEAST_ONE,
    "accumulate": AT_LEAST_ONE,
    "sim_lr_scale": POSITIVE,
    "final_lr": SHARE,
    "betas": SHARE_BELOW_ONE,
    "weight_decay": NOT_NEGATIVE,
    "clip": POSITIVE,
    "max_skipped": AT_LEAST_ONE,
    "log_every": AT_LEAST_ONE,
    "checkpoint_seconds": PERIOD,
    "validate_seconds": PERIOD,
    "rollout_every": NOT_NEGATIVE,
    "keep": AT_LEAST_ONE,
}
"""Of the fields that have no message of their own."""
FIRST_RATE = 0.01  # share of lr at which the warm-up of a run in seconds begins


@dataclass
class Progress:
    """How far a run has come: optimiser steps, and seconds spent in them.

    skipped: steps without a finite loss and gradient; `skipped_in_row`: since the last one that had both.
    best: the lowest validation so far, and `best_step` its checkpoint.
    """

    step: int = 0
    seconds: float = 0.0
    skipped: int = 0
    skipped_in_row: int = 0
    best: float | None = None
    best_step: int | None = None


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation. Defaults are the paper's, save for weight decay on norms, biases and modulations: none.

    Exactly one of `steps`, `seconds` and `epochs` is given. A run of epochs becomes one of steps once its data are
    known (`resolved`): an epoch is `samples_per_episode` clips an episode, or all clips once where that is None.

    A step whose loss or gradient is not finite is skipped; `max_skipped` of them in a row end the run. The last `keep`
    checkpoints are kept, and the best by validation. `rollout_every` 0: no rollouts are watched. `checkpoint_seconds`
    and `validate_seconds` may be 0, which means after every step, and infinite: not before the end.

    Raises:
        SimForcingError: a number is NaN or out of its range; names the field.
    """

    steps: int | None = None
    seconds: float | None = None
    epochs: float | None = None
    samples_per_episode: int | None = None
    batch_size: int = 16  # clips a process and backward pass
    accumulate: int = 1  # backward passes a step
    lr: float = 1e-4
    sim_lr_scale: float = 1.0  # of the projections that start at zero
    warmup: float = 0.05  # share of the run
    final_lr: float = 0.01  # share of lr
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 1.0
    ema: float | None = None  # decay of the average of the weights that becomes the result, such as 0.999
    seed: int = 0
    max_skipped: int = 10
    log_every: int = 20
    checkpoint_seconds: float = 60.0
    validate_seconds: float = 60.0
    rollout_every: int = 0  # steps
    keep: int = KEEP

    def __post_init__(self) -> None:
        check_seed(self.seed)
        lengths = [length for length in (self.steps, self.seconds, self.epochs) if length is not None]
        if len(lengths) != 1 or not 0 < lengths[0] < math.inf:
            raise SimForcingError("a run's length is steps, seconds or epochs: give exactly one, above zero and finite")
        if self.samples_per_episode is not None and self.samples_per_episode < 1:
            raise SimForcingError(f"samples per episode {self.samples_per_episode}: an epoch needs at least one")
        if self.batch_size < 1:
            raise SimForcingError(f"batch size {self.batch_size}: a step needs at least one clip")
        for name in ("accumulate", "max_skipped", "log_every", "keep"):
            if getattr(self, name) < 1:
                raise SimForcingError(f"{name} {getattr(self, name)}: give at least 1")
        if self.ema is not None and not 0 < self.ema < 1:
            raise SimForcingError(f"ema {self.ema}: the decay of an average lies between 0 and 1")
        if not 0 < self.lr < math.inf:
            raise SimForcingError(f"learning rate {self.lr}: give a number above zero")
        if not 0 <= self.warmup < 1:
            raise SimForcingError(f"warmup {self.warmup}: a share of the run, at least 0 and below 1")
        for name, allowed in RANGES.items():
            allowed.check(name, getattr(self, name))

    def lasting(
        self, *, steps: int | None = None, seconds: float | None = None, epochs: float | None = None
    ) -> "TrainConfig":
        """The same optimisation for another length; unchanged where none is given."""
        if steps is None and seconds is None and epochs is None:
            return self
        return replace(self, steps=steps, seconds=seconds, epochs=epochs)

    def resolved(self, clips: int, episodes: int, processes: int = 1) -> "TrainConfig":
        """Epochs as optimiser steps, rounded up; a step takes `accumulate * batch_size` clips in each process.

        A run of steps or seconds stays as it is.
        """
        if self.epochs is None:
            return self
        epoch = clips if self.samples_per_episode is None else episodes * self.samples_per_episode
        return self.lasting(steps=math.ceil(self.epochs * epoch / self.clips(processes)))

    def clips(self, processes: int = 1) -> int:
        """Clips that one optimiser step takes."""
        return self.batch_size * self.accumulate * processes

    def passed(self, progress: Progress) -> float:
        """Share of the run that is done, in [0, 1].

        Raises:
            SimForcingError: the run is counted in epochs, and `resolved` has not said how many steps they are.
        """
        if self.epochs is not None:
            raise SimForcingError("a run of epochs has no length before its data are known; call resolved()")
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
