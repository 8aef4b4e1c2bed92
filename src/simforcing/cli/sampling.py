"""What `predict` and `evaluate` share: how a model is sampled, where simulation comes from, what it may be run on."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from simforcing.errors import SimForcingError, check_seed

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import UInt8
    from torch import Tensor

    from simforcing.data.episode import Dataset
    from simforcing.model.world_model import WorldModel
    from simforcing.predict.predictor import Predictor, Start
    from simforcing.predict.sampler import Guidance


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of both sampling stages. Legend: B clips, T frames, H W pixels, C F h w latents."""

    w: Annotated[float, tyro.conf.arg(aliases=["-w"])] = 0.6
    """Guidance weight; 0 needs no simulation."""
    sim_steps: int = 1
    """Sampling steps of the simulation stage."""
    real_steps: int = 10
    """Sampling steps of the real stage."""
    simulation: Literal["predicted", "rendered"] = "predicted"
    """Where the simulation comes from: the model itself (or --sim-model), or the dataset's rendered replay."""
    sim_model: str | None = None
    """Another model to predict the simulation, such as the teacher."""
    guidance_kind: Literal["branches", "soft"] = "branches"
    """Two velocities mixed by w, or one pass whose gate is w."""
    guided_noise: tuple[float, float] = (0.0, 1.0)
    """Noise levels (0: the clean video) at which the simulation is followed; elsewhere w is 0."""
    solver: Literal["euler", "midpoint", "heun"] = "euler"
    """Of the real stage: euler, the paper's; the others are of second order and look twice a step."""
    seed: int = 0
    """Noise."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one."""

    def __post_init__(self) -> None:
        check_seed(self.seed, "--seed")

    @property
    def guidance(self) -> "Guidance":
        """How the simulation is followed.

        Raises:
            SimForcingError: a number makes no sense.
        """
        from simforcing.predict.sampler import Guidance

        return Guidance(self.w, self.guidance_kind, noise=self.guided_noise)

    def open(self, source: str | Path, guided: bool = True) -> "WorldModel":
        """The model of this name, on the device. guided: it is to follow simulation, unless w is 0.

        Raises:
            SimForcingError: there is none, or it cannot follow any.
        """
        from simforcing.model.device import pick_device
        from simforcing.model.world_model import WorldModel

        _ = self.guidance  # refused before anything is loaded
        model = WorldModel.from_pretrained(source)
        if guided and self.w != 0 and not model.config.sim_condition:
            raise SimForcingError(f"{source}: this model sees no simulation, so it has no guidance weight; use -w 0")
        return model.to(pick_device(self.device))

    @property
    def source(self) -> str:
        """Where the simulation comes from, in a word."""
        return "rendered" if self.simulation == "rendered" else self.sim_model or "predicted"

    def reference(
        self, predictor: "Predictor", begin: "Start", rendered: "UInt8[np.ndarray, 'B T H W 3'] | None"
    ) -> "Tensor | None":
        """Simulation latents [B, C, F, h, w] to be guided by; None with w = 0.

        Raises:
            SimForcingError: the rendered simulation is asked for and missing, or the simulating model does not fit.
        """
        from simforcing.predict.predictor import Predictor

        if self.w == 0:
            return None
        if self.simulation == "rendered":
            if rendered is None:
                raise SimForcingError("the dataset has no rendered simulation; use --simulation predicted or -w 0")
            return predictor.encode(rendered)
        if self.sim_model is None:
            return predictor.simulation(begin, self.sim_steps)
        other = Predictor(self.open(self.sim_model, guided=False), predictor.codec)
        _same_convention(other, predictor.preparation.action.to_dict(), self.sim_model, "the model to predict with")
        return other.simulation(begin, self.sim_steps)

    def video(
        self, predictor: "Predictor", begin: "Start", reference: "Tensor | None"
    ) -> "UInt8[np.ndarray, 'B T H W 3']":
        """Predicted real videos."""
        from simforcing.predict.sampler import SamplerConfig

        config = SamplerConfig(solver=self.solver)
        return predictor.decode(predictor.real(begin, self.real_steps, reference, self.guidance, config))


def check_dataset(predictor: "Predictor", dataset: "Dataset", model: str | Path) -> None:
    """Refuses a dataset whose actions mean something else than those that the model was trained on.

    Raises:
        SimForcingError: names what differs, with both values.
    """
    _same_convention(predictor, dataset.action_convention.to_dict(), model, str(dataset.root))


def check_targets(*files: Path) -> None:
    """Refuses files to write that exist, or that have no directory, before anything is computed."""
    for file in files:
        if file.exists():
            raise SimForcingError(f"{file} exists; choose another name")
        if not file.parent.is_dir():
            raise SimForcingError(f"{file}: there is no directory {file.parent}; make it first")


def _same_convention(predictor: "Predictor", theirs: dict[str, Any], model: str | Path, where: str) -> None:
    ours = predictor.preparation.action.to_dict()
    differs = [f"{k} is {ours[k]!r} in {model} and {theirs[k]!r} in {where}" for k in ours if ours[k] != theirs[k]]
    if differs:
        raise SimForcingError(f"actions mean something else: {'; '.join(differs)}; convert the data, or train on them")
