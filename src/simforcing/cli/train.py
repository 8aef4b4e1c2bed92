"""`simforcing train`: teacher, student or baseline."""

import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from simforcing.errors import SimForcingError

if TYPE_CHECKING:
    import torch

    from simforcing.model.world_model import WorldModel
    from simforcing.train.checkpoint import Progress
    from simforcing.train.config import TrainConfig
    from simforcing.train.loop import Run
    from simforcing.train.parallel import Team
    from simforcing.train.recipe import Recipe
    from simforcing.train.roles import Data, Objective

TEACHER = "bundled"


@dataclass(frozen=True)
class Train:
    """Train a teacher (simulation), a student (pairs, under a frozen teacher) or a baseline (real video only).

    Resumes by itself from OUT; a run of another configuration or other data there is refused. SIGTERM saves and stops.
    The result is OUT/model. Several GPUs: start the same command by torchrun; a step then takes as many times the
    clips, and a run goes on with another number of processes if --batch-size and --accumulate keep the clips of a step.

    Example:
      simforcing train student --data runs/latents --teacher runs/teacher/model --out runs/student
      torchrun --nproc-per-node 8 -m simforcing.cli.main train student --data runs/latents ...
    """

    role: Annotated[Literal["teacher", "student", "baseline"], tyro.conf.Positional]
    """What to train."""
    data: Path
    """Cache that `encode` made."""
    out: Path
    """Directory of the run."""
    teacher: str | None = None
    """Model directory to start from, or 'bundled', the one that ships. A student needs one; a baseline may have one. A
    teacher may start from another robot's: it keeps the weights and takes the new data's statistics."""
    recipe: str = "demo"
    """Sizes, optimisation and objective."""
    codec: str | None = None
    """Codec that the latents were made with, where the recipe's does not come with the package."""
    text: str | None = None
    """Text encoder, likewise: umt5:DIR, or a directory of embeddings."""
    compat: Literal["corrected", "released"] = "corrected"
    """released: the student's objective as the released code computes it, its defects included."""
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
    """Fields of the recipe, such as objective.motion_target=value or training.ema=0.999."""
    lora: int | None = None
    """Train adapters of this rank on frozen projections, instead of all weights; needs --teacher."""
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

        try:
            return self._run()
        except SimForcingError:
            if os.environ.get("RANK", "0") == "0":
                raise
            return 2  # the main process says it

    def _run(self) -> int:
        import torch

        from simforcing.model.device import pick_device
        from simforcing.train.parallel import assembled
        from simforcing.train.roles import Data, check_fits

        if self.threads is not None:
            if self.threads < 1:
                raise SimForcingError(f"--threads {self.threads}: give at least 1")
            torch.set_num_threads(self.threads)
        device = pick_device(self.device)
        found = self._recipe()
        config = self._config(found)
        data = Data(self.data, self.data / "split.json", found)
        start = self._start()
        imported = start is not None and start.preparation is None and self.role != "student"
        if start is not None and self.role != "teacher" and not imported:
            check_fits(start, data.header, f"the model {self.teacher}")
        compute = self._compute(device)
        model, loss = self._model(found, data, start, compute)
        with assembled(self.parallel, device, sum(p.numel() for p in model.parameters())) as team:
            description = self._description(found, config, data, team.size, compute)
            return self._train(model, loss, config, data, team, compute, description)

    def _train(
        self,
        model: "WorldModel",
        loss: "Objective",
        config: "TrainConfig",
        data: "Data",
        team: "Team",
        compute: "torch.dtype",
        description: dict[str, Any],
    ) -> int:
        from simforcing.cli.show import progress
        from simforcing.cli.watch import Rollouts
        from simforcing.train.directory import claim_run
        from simforcing.train.loop import Run, Stopped, train
        from simforcing.train.parallel import Arrangement
        from simforcing.train.validate import validation

        assert model.preparation is not None
        clips, held_out = data.parts(model.preparation, self.role)
        team.on_main(lambda: claim_run(self.out, description))
        run = Run(
            model,
            clips,
            loss,
            config,
            self.out,
            validate=validation(held_out, team=team),
            rollout=Rollouts(held_out, self.out, team),
            team=team,
            arrangement=Arrangement(compute, self.recompute),
            wandb=self.wandb,
        )
        with progress() if team.main else nullcontext() as report:

            def show(passed: float, row: dict[str, Any]) -> None:
                words = f"step {row['step']}" + (f", loss {row['total']:.3f}" if "total" in row else "")
                if "skipped_step" in row:
                    print(
                        f"step {row['skipped_step']} skipped, not finite: {', '.join(row['skipped_clips'])}",
                        file=sys.stderr,
                    )
                if report is not None:
                    report(f"training the {self.role}", passed, words)

            run.report = show
            try:
                done = train(run)
            except Stopped as stop:
                if team.main:
                    print(
                        f"stopped after step {stop.step} and saved; the same command goes on from there",
                        file=sys.stderr,
                    )
                raise
        return self._written(run, done)

    def _written(self, run: "Run", done: "Progress") -> int:
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
            print(f"{target}: {self.role} after {step} steps, {done.seconds:.0f} s of training")
        return 0

    def _recipe(self) -> "Recipe":
        from dataclasses import replace

        from simforcing.data.cache import read_header
        from simforcing.recipes import named, recipe
        from simforcing.train.overrides import overridden
        from simforcing.train.recipe import TO_SUPPLY

        text = self.text
        if text is None and named(self.recipe).text in TO_SUPPLY:
            text = read_header(self.data).get("text_source")  # the cache holds its embeddings
        found = recipe(self.recipe, self.codec, text)
        if self.compat == "released":
            found = replace(found, objective=found.objective.as_released())
        return overridden(found, self.role, self.set)

    def _compute(self, device: "torch.device") -> "torch.dtype":
        import torch

        half = self.precision == "bfloat16" or (self.precision == "auto" and device.type == "cuda")
        return torch.bfloat16 if half else torch.float32

    def _config(self, found: "Recipe") -> "TrainConfig":
        from dataclasses import replace

        if self.seconds is not None and self.steps is not None:
            raise SimForcingError("--seconds and --steps are two ways to say the same; give one")
        config = replace(found.training(self.role), seed=self.seed)
        if self.steps is not None:
            config = config.lasting(steps=self.steps)
        if self.seconds is not None:
            config = config.lasting(seconds=self.seconds)
        given = {name: getattr(self, name) for name in ("batch_size", "accumulate", "lr")}
        return replace(config, **{name: value for name, value in given.items() if value is not None})

    def _start(self) -> "WorldModel | None":
        from simforcing.model.world_model import WorldModel, bundled_teacher

        if self.role == "student" and self.teacher is None:
            raise SimForcingError("a student needs --teacher: a model directory, or 'bundled'")
        if self.teacher is None:
            return None
        return WorldModel.from_pretrained(bundled_teacher() if self.teacher == TEACHER else self.teacher)

    def _model(
        self, found: "Recipe", data: "Data", start: "WorldModel | None", compute: "torch.dtype"
    ) -> tuple["WorldModel", "Objective"]:
        import copy

        from simforcing.train.lora import add_adapters
        from simforcing.train.roles import adapted, distilled_loss, flow_loss, new_model, student_of

        loss = flow_loss(found.flow_objective)
        if start is None:
            if self.lora is not None:
                raise SimForcingError("--lora adapts a model: give --teacher with the one to start from")
            return new_model(found, data.preparation(found), data.channels, self.seed), loss
        model = start
        if self.role == "teacher" or start.preparation is None:
            model = adapted(start, data.preparation(found))
        elif self.role == "student":
            model, loss = student_of(copy.deepcopy(start)), distilled_loss(start, found.objective)
        if self.lora is not None:
            add_adapters(model, self.lora, self.seed, compute)
        return model, loss

    def _description(
        self, found: "Recipe", config: "TrainConfig", data: "Data", processes: int, compute: "torch.dtype"
    ) -> dict[str, Any]:
        """What defines the run. `batch_size` is of a step, however many processes and backward passes share it."""
        training = asdict(config) | {"batch_size": config.clips(processes)}
        del training["accumulate"]
        started = {
            "role": self.role,
            "recipe": self.recipe,
            "training": training,
            "precision": str(compute).removeprefix("torch."),
            "lora": self.lora,
            "start": "scratch" if self.teacher is None else fingerprint(self.teacher),
        }
        kept = {k: data.header[k] for k in ("source", "codec", "rule", "every")}
        return started | {
            "objective": asdict(found.objective if self.role == "student" else found.flow_objective),
            "data": kept,
            "split": data.split,
        }


def fingerprint(teacher: str) -> str:
    """Which weights a run starts from, wherever they lie: sha256 of `model.safetensors`, 16 digits.

    Raises:
        SimForcingError: there is no such file.
    """
    import hashlib

    from huggingface_hub import try_to_load_from_cache

    from simforcing.model.world_model import bundled_teacher

    root = bundled_teacher() if teacher == TEACHER else Path(teacher)
    name = "model.safetensors"
    file = root / name if root.is_dir() else try_to_load_from_cache(teacher, name)
    if not isinstance(file, (str, Path)):
        raise SimForcingError(f"{teacher}: no {name} there")
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
