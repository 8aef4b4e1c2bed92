"""`simforcing train`: teacher, student or baseline."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from simforcing.errors import SimForcingError

if TYPE_CHECKING:
    from simforcing.model.world_model import WorldModel
    from simforcing.train.loop import TrainConfig
    from simforcing.train.recipe import Recipe
    from simforcing.train.roles import Data

TEACHER = "bundled"


@dataclass(frozen=True)
class Train:
    """Train a teacher (simulation), a student (pairs, under a frozen teacher) or a baseline (real video only).

    Resumes by itself from OUT; a run of another configuration there is refused. The result is OUT/model.

    Example:
      simforcing train student --data runs/latents --teacher runs/teacher/model --out runs/student
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
    seconds: float | None = None
    """Length of the run in seconds of training; default the recipe's."""
    steps: int | None = None
    """Length of the run in steps, instead of seconds."""
    batch_size: int | None = None
    """Clips a step; default the recipe's."""
    lr: float | None = None
    """Peak learning rate; default the recipe's."""
    seed: int = 0
    """Weights, order and noise follow from it."""
    threads: int | None = None
    """CPU threads; default all."""

    def run(self) -> int:
        """Trains to the end and prints where the model is."""
        import torch

        from simforcing.cli.show import progress
        from simforcing.recipes import recipe
        from simforcing.train.checkpoint import claim_run
        from simforcing.train.loop import Run, train
        from simforcing.train.roles import Data, check_fits
        from simforcing.train.validate import validation

        if self.threads is not None:
            if self.threads < 1:
                raise SimForcingError(f"--threads {self.threads}: give at least 1")
            torch.set_num_threads(self.threads)
        found = recipe(self.recipe)
        config = self._config(found)
        data = Data(self.data, self.data / "split.json", found)
        start = self._start()
        if start is not None and self.role != "teacher":
            check_fits(start, data.header, f"the model {self.teacher}")
        model, loss = self._model(found, data, start)
        assert model.preparation is not None
        train_clips, val_clips = data.parts(model.preparation, self.role)
        validate = validation(val_clips)
        claim_run(self.out, self._description(found, config, data))
        with progress() as report:

            def show(passed: float, row: dict[str, Any]) -> None:
                words = f"step {row['step']}" + (f", loss {row['total']:.3f}" if "total" in row else "")
                report(f"training the {self.role}", passed, words)

            done = train(Run(model, train_clips, loss, config, self.out, validate, show))
        if not (self.out / "model").exists():
            model.eval().save_pretrained(self.out / "model")
        print(f"{self.out / 'model'}: {self.role} after {done.step} steps, {done.seconds:.0f} s")
        return 0

    def _config(self, found: "Recipe") -> "TrainConfig":
        from dataclasses import replace

        if self.seconds is not None and self.steps is not None:
            raise SimForcingError("--seconds and --steps are two ways to say the same; give one")
        config = replace(found.training(self.role), seed=self.seed)
        if self.steps is not None:
            config = replace(config, steps=self.steps, seconds=None)
        if self.seconds is not None:
            config = replace(config, seconds=self.seconds, steps=None)
        if self.batch_size is not None:
            config = replace(config, batch_size=self.batch_size)
        return config if self.lr is None else replace(config, lr=self.lr)

    def _start(self) -> "WorldModel | None":
        from simforcing.model.world_model import WorldModel, bundled_teacher

        if self.role == "student" and self.teacher is None:
            raise SimForcingError("a student needs --teacher: a model directory, or 'bundled'")
        if self.teacher is None:
            return None
        return WorldModel.from_pretrained(bundled_teacher() if self.teacher == TEACHER else self.teacher)

    def _model(self, found: "Recipe", data: "Data", start: "WorldModel | None") -> tuple["WorldModel", Any]:
        import copy

        from simforcing.train.roles import adapted, distilled_loss, new_model, single_loss, student_of

        if start is None:
            return new_model(found, data.preparation(found), data.channels, self.seed), single_loss
        if self.role == "teacher":
            return adapted(start, data.preparation(found)), single_loss
        if self.role == "student":
            return student_of(copy.deepcopy(start)), distilled_loss(start, found.objective)
        return start, single_loss

    def _description(self, found: "Recipe", config: "TrainConfig", data: "Data") -> dict[str, Any]:
        started = {
            "role": self.role,
            "recipe": self.recipe,
            "training": asdict(config),
            "start": "scratch" if self.teacher is None else fingerprint(self.teacher),
        }
        kept = {k: data.header[k] for k in ("source", "codec", "rule", "every")}
        return started | {
            "objective": asdict(found.objective) if self.role == "student" else None,
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
