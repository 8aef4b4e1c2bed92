"""What all commands that train have in common: options, the run with its progress, its result."""

import json
import sys
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from simforcing.errors import SimForcingError

if TYPE_CHECKING:
    import torch

    from simforcing.train.checkpoint import Progress
    from simforcing.train.config import TrainConfig
    from simforcing.train.loop import Run


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(ABC):
    """Options of a training run."""

    out: Path
    """Directory of the run."""
    seconds: float | None = None
    """Length of the run in seconds of training; default the recipe's."""
    steps: int | None = None
    """Length of the run in steps, instead of seconds."""
    batch_size: int | None = None
    """Clips a process and backward pass; default the recipe's."""
    accumulate: int | None = None
    """Backward passes a step."""
    lr: float | None = None
    """Peak learning rate; default the recipe's."""
    set: tuple[str, ...] = ()
    """Fields of the recipe, such as objective.video_weight=0.5 or training.ema=0.999."""
    seed: int = 0
    """Weights, order and noise follow from it."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """What is computed in; auto: bfloat16 on a GPU. Weights that are trained and their gradients stay float32."""
    parallel: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    """How processes that torchrun started share the work; auto: ddp where a GPU holds everything, else fsdp."""
    recompute: bool = False
    """Keep only the input of each block for the backward pass: less memory, a third more time."""
    result: Literal["last", "best"] = "last"
    """Weights to write: the last to OUT/model, or those that were best in validation to OUT/model-best."""
    wandb: str | None = None
    """Project of Weights & Biases to log to as well."""
    threads: int | None = None
    """CPU threads; default all."""

    def run(self) -> int:
        """Trains to the end and prints where the model is."""
        import os

        import torch

        from simforcing.model.device import pick_device

        try:
            if self.threads is not None:
                if self.threads < 1:
                    raise SimForcingError(f"--threads {self.threads}: give at least 1")
                torch.set_num_threads(self.threads)
            return self.train(pick_device(self.device))
        except SimForcingError:
            if os.environ.get("RANK", "0") == "0":
                raise
            return 2  # the main process says it

    @abstractmethod
    def train(self, device: "torch.device") -> int:
        """Does it; in every process that torchrun started."""

    def lasting(self, config: "TrainConfig") -> "TrainConfig":
        """A recipe's training with the options that are given."""
        if self.seconds is not None and self.steps is not None:
            raise SimForcingError("--seconds and --steps are two ways to say the same; give one")
        config = replace(config, seed=self.seed)
        if self.steps is not None:
            config = config.lasting(steps=self.steps)
        if self.seconds is not None:
            config = config.lasting(seconds=self.seconds)
        given = {name: getattr(self, name) for name in ("batch_size", "accumulate", "lr")}
        return replace(config, **{name: value for name, value in given.items() if value is not None})

    def compute(self, device: "torch.device") -> "torch.dtype":
        """What is computed in."""
        import torch

        half = self.precision == "bfloat16" or (self.precision == "auto" and device.type == "cuda")
        return torch.bfloat16 if half else torch.float32

    def described(self, config: "TrainConfig", processes: int, compute: "torch.dtype") -> dict[str, Any]:
        """How a run is optimised. `batch_size` is of a step, however many processes and backward passes share it."""
        training = asdict(config) | {"batch_size": config.clips(processes)}
        del training["accumulate"]
        return {"training": training, "precision": str(compute).removeprefix("torch.")}

    def carry_out(self, run: "Run", name: str) -> int:
        """Trains what is called `name`, with a progress bar, writes the result and prints where it is."""
        from simforcing.cli.show import progress
        from simforcing.train.loop import Stopped, train

        with progress() if run.team.main else nullcontext() as report:

            def show(passed: float, row: dict[str, Any]) -> None:
                words = f"step {row['step']}" + (f", loss {row['total']:.3f}" if "total" in row else "")
                if "skipped_step" in row:
                    print(
                        f"step {row['skipped_step']} skipped, not finite: {', '.join(row['skipped_clips'])}",
                        file=sys.stderr,
                    )
                if report is not None:
                    report(f"training the {name}", passed, words)

            run.report = show
            if run.team.main:
                note_environment(self.out)
            try:
                done = train(run)
            except Stopped as stop:
                if run.team.main:
                    print(
                        f"stopped after step {stop.step} and saved; the same command goes on from there",
                        file=sys.stderr,
                    )
                raise
        return self._written(run, done, name)

    def _written(self, run: "Run", done: "Progress", name: str) -> int:
        from simforcing.train.checkpoint import load_weights
        from simforcing.train.parallel import whole

        target, step = self.out / "model", done.step
        if self.result == "best":
            if done.best_step is None:
                raise SimForcingError(f"{self.out} was not validated, so no checkpoint is the best")
            target, step = self.out / "model-best", done.best_step
            checkpoint = self.out / "checkpoints" / f"step-{step:08d}"
            load_weights(checkpoint, run.model, averaged=run.config.ema is not None, team=run.team)
        if not run.team.on_main(target.exists):
            trained = whole(run.model, run.team)
            run.team.on_main(lambda: trained.save_pretrained(target))
        if run.team.main:
            print(f"{target}: {name} after {step} steps, {done.seconds:.0f} s of training{_followed(self.out)}")
        return 0


def note_environment(out: Path) -> None:
    """Adds the code's version and the machine to `environment.jsonl` of a run, where they are not what they were."""
    from simforcing.evaluate.protocol import code_version, describe_machine
    from simforcing.train.directory import append_row

    row, file = {"code": code_version(), **describe_machine()}, out / "environment.jsonl"
    last = file.read_text(encoding="utf-8").splitlines()[-1:] if file.exists() else []
    if last != [json.dumps(row)]:
        append_row(file, row)


def _followed(out: Path) -> str:
    """What a run's log last says of whether the model looks at its actions."""
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    ratios = [row["val_action_ratio"] for row in rows if "val_action_ratio" in row]
    if not ratios:
        return ""
    return f"; action ratio {ratios[-1]:.2f}" + (
        " (near 1: it hardly looks at its actions)" if ratios[-1] < 1.1 else ""
    )
