"""`simforcing train`: teacher, student or baseline."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from simforcing.cli.training import TrainingOptions
from simforcing.errors import SimForcingError

if TYPE_CHECKING:
    import torch

    from simforcing.model.world_model import WorldModel
    from simforcing.train.config import TrainConfig
    from simforcing.train.parallel import Team
    from simforcing.train.recipe import Recipe
    from simforcing.train.roles import Data, Objective


@dataclass(frozen=True)
class Train(TrainingOptions):
    """Train a teacher (simulation), a student (pairs, under a frozen teacher) or a baseline (real video only).

    Resumes by itself from OUT; a run of another configuration or other data there is refused. SIGTERM saves and stops.
    The result is OUT/model. Several GPUs: start the same command by torchrun; a step then takes as many times the
    clips, and a run goes on with another number of processes if --batch-size and --accumulate keep the clips of a step.

    Example:
      simforcing train student --data runs/latents --teacher runs/teacher/model --out runs/student
      torchrun --nproc-per-node 8 -m simforcing.cli.main train baseline --data runs/latents --out runs/b
    """

    role: Annotated[Literal["teacher", "student", "baseline"], tyro.conf.Positional]
    """What to train."""
    data: Path
    """Cache that `encode` made."""
    teacher: str | None = None
    """Model directory to start from, or 'bundled', the one that ships. A student needs one; a baseline may have one. A
    teacher may start from another robot's: it keeps the weights and takes the new data's statistics."""
    recipe: str = "demo"
    """Sizes, optimisation and objective."""
    preset: str | None = None
    """A named training; what it sets comes before --set. Student: full (the method), joint, no-distillation,
    no-conditioning, value, unanchored, light. Baseline: scratch, real-only (from --teacher). Teacher: teacher."""
    codec: str | None = None
    """Codec that the latents were made with, where the recipe's does not come with the package."""
    text: str | None = None
    """Text encoder, likewise: umt5:DIR, or a directory of embeddings."""
    compat: Literal["corrected", "released"] = "corrected"
    """released: the student's objective as the released code computes it, its defects included."""
    lora: int | None = None
    """Train adapters of this rank on frozen projections, instead of all weights; needs --teacher."""

    def train(self, device: "torch.device") -> int:
        """See `TrainingOptions.train`."""
        from simforcing.train.parallel import assembled
        from simforcing.train.roles import Data, check_fits

        found = self._recipe()
        config = self.lasting(found.training(self.role))
        data = Data(self.data, self.data / "split.json", found)
        start = self._start()
        imported = start is not None and start.preparation is None and self.role != "student"
        if start is not None and self.role != "teacher" and not imported:
            check_fits(start, data.header, f"the model {self.teacher}")
        compute = self.compute(device)
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
        from simforcing.cli.watch import Rollouts
        from simforcing.train.directory import claim_run
        from simforcing.train.loop import Run
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
        return self.carry_out(run, self.role)

    def _recipe(self) -> "Recipe":
        from dataclasses import replace

        from simforcing.data.cache import read_header
        from simforcing.recipes import named, recipe
        from simforcing.train.overrides import overridden
        from simforcing.train.presets import preset
        from simforcing.train.recipe import TO_SUPPLY

        text = self.text
        if text is None and named(self.recipe).text in TO_SUPPLY:
            text = read_header(self.data).get("text_source")  # the cache holds its embeddings
        found = recipe(self.recipe, self.codec, text)
        if self.compat == "released":
            found = replace(found, objective=found.objective.as_released())
        settings = self.set
        if self.preset is not None:
            settings = (*preset(self.preset, self.role, self.teacher is not None).settings, *settings)
        return overridden(found, self.role, settings)

    def _start(self) -> "WorldModel | None":
        from simforcing.model.world_model import WorldModel

        if self.role == "student" and self.teacher is None:
            raise SimForcingError("a student needs --teacher: a model directory, or 'bundled'")
        if self.teacher is None:
            return None
        return WorldModel.from_pretrained(self.teacher)

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
        """What defines the run."""
        started = {
            "role": self.role,
            "recipe": self.recipe,
            **self.described(config, processes, compute),
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
        SimForcingError: there is no such file; one of the hub must have been downloaded.
    """
    import hashlib

    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from simforcing.model.world_model import located

    root = located(teacher)
    name = "model.safetensors"
    try:
        file = root / name if root.is_dir() else try_to_load_from_cache(teacher, name)
        if not isinstance(file, (str, Path)):
            raise SimForcingError(f"{teacher}: no {name} there")
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    except (HFValidationError, OSError):
        raise SimForcingError(f"{teacher}: no {name} there") from None
