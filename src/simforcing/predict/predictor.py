"""From pictures and stored actions to predicted pictures: codec, preparation and both sampling stages.

Legend: B batch, T frames, A actions, H W pixels, C F h w latents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from simforcing.errors import InputError, SimForcingError, check_shape
from simforcing.model.codec import Codec, to_pixels, to_unit
from simforcing.model.preparation import Preparation
from simforcing.model.text import Domain
from simforcing.model.world_model import WorldModel
from simforcing.predict.sampler import Guidance, Inputs, SamplerConfig, sample, start_noise, two_stages

BATCH = 16


@dataclass(frozen=True)
class Start:
    """What a prediction starts from: first frames, stored (not normalised) actions and state, instructions.

    `sim_first` is needed where the simulation is predicted.
    """

    real_first: UInt8[np.ndarray, "B H W 3"]
    action: Float32[np.ndarray, "B A a"]
    proprio: Float32[np.ndarray, "B p"]
    tasks: Sequence[str]
    sim_first: UInt8[np.ndarray, "B H W 3"] | None = None
    seeds: Sequence[int] | None = None  # of the noise, one a clip; default 0, 1, ...

    def __len__(self) -> int:
        return len(self.tasks)

    def part(self, rows: slice) -> "Start":
        """Some of the clips; each keeps its seed."""
        seeds = list(range(len(self))) if self.seeds is None else list(self.seeds)
        sim = None if self.sim_first is None else self.sim_first[rows]
        return Start(
            self.real_first[rows],
            self.action[rows],
            self.proprio[rows],
            list(self.tasks)[rows],
            sim,
            seeds[rows],
        )

    def with_actions_of(self, other: np.ndarray) -> "Start":
        """The same starts under the actions of other rows."""
        return replace(self, action=self.action[other])


@dataclass(frozen=True)
class Prediction:
    """Predicted videos, their first frame included; `sim` is None where nothing needed it (w = 0)."""

    real: UInt8[np.ndarray, "B T H W 3"]
    sim: UInt8[np.ndarray, "B T H W 3"] | None


class Predictor:
    """A model with its codec, in batches of `BATCH` clips. A clip's result does not depend on its batch.

    Raises:
        SimForcingError: the model has no preparation, or the codec is not the one that it was trained with.
    """

    def __init__(self, model: WorldModel, codec: Codec | None = None) -> None:
        if model.preparation is None:
            raise SimForcingError("this model does not say how its inputs are prepared; load one that was trained here")
        self.model = model.eval()
        self.preparation: Preparation = model.preparation
        wanted = self.preparation.codec_identity
        if codec is not None and wanted and codec.identity != wanted:
            raise SimForcingError(f"the codec given is {codec.identity}, but the model was trained with {wanted}")
        self.codec = (self.preparation.load_codec() if codec is None else codec).to(model.device)

    def predict(self, start: Start, w: float = 0.6, sim_steps: int = 1, real_steps: int = 10) -> Prediction:
        """Both stages: the simulation, then the real video under it; w = 0 leaves the simulation out."""
        real, sim = [], []
        for piece in self._pieces(start):
            inputs = self._inputs(piece, "real")
            same = self.preparation.prompts["real"] == self.preparation.prompts["sim"]
            sim_inputs = inputs if same else self._inputs(piece, "sim")
            first, noise = self._firsts(piece, "real")
            first_sim = None if w == 0 else self._firsts(piece, "sim")[0]
            made = two_stages(
                self.model, first, first_sim, inputs, sim_inputs, noise, sim_steps, real_steps, Guidance(w)
            )
            real.append(self.decode(made.real))
            sim += [] if made.sim is None else [self.decode(made.sim)]
        return Prediction(np.concatenate(real), np.concatenate(sim) if sim else None)

    def simulation(self, start: Start, steps: int) -> Tensor:
        """Predicted simulation latents [B, C, F, h, w].

        Raises:
            SimForcingError: there is no simulated first frame.
        """
        parts = []
        for piece in self._pieces(start):
            first, noise = self._firsts(piece, "sim")
            parts.append(sample(self.model, first, self._inputs(piece, "sim"), noise, steps))
        return torch.cat(parts)

    def real(
        self,
        start: Start,
        steps: int,
        sim: Tensor | None = None,
        guidance: Guidance = Guidance(w=0.0),
        config: SamplerConfig = SamplerConfig(),
    ) -> Tensor:
        """Predicted real latents [B, C, F, h, w], conditioned on simulation latents from wherever they come."""
        parts, done = [], 0
        for piece in self._pieces(start):
            first, noise = self._firsts(piece, "real")
            reference = None if sim is None else sim[done : done + len(piece)]
            inputs = self._inputs(piece, "real")
            parts.append(sample(self.model, first, inputs, noise, steps, reference, guidance, config))
            done += len(piece)
        return torch.cat(parts)

    def _pieces(self, start: Start) -> list[Start]:
        """Checked, and in batches.

        Raises:
            InputError: names the argument, what it is and what it must be.
        """
        rule, sizes, count = self.preparation.rule, self.model.config, len(start)
        picture = [count, rule.height, rule.width, 3]
        check_shape("first_real", start.real_first, picture)
        if start.sim_first is not None:
            check_shape("first_sim", start.sim_first, picture)
        check_shape("action", start.action, [count, rule.actions, sizes.action_dim])
        check_shape("proprio", start.proprio, [count, sizes.proprio_dim])
        for name, numbers in (("action", start.action), ("proprio", start.proprio)):
            if not np.isfinite(numbers).all():
                raise InputError(
                    f"{name} of shape {list(numbers.shape)} holds NaN or infinite values, it must be finite"
                )
        if start.seeds is not None and len(start.seeds) != count:
            raise InputError(f"seeds has {len(start.seeds)} numbers, it must have {count}, one a clip")
        return [start.part(slice(i, i + BATCH)) for i in range(0, count, BATCH)]

    @torch.inference_mode()
    def encode(self, frames: UInt8[np.ndarray, "B T H W 3"]) -> Tensor:
        """Latents of videos."""
        parts = np.array_split(frames, _count(len(frames)))
        device = self.model.device
        return torch.cat([self.codec.encode(to_unit(torch.from_numpy(part).to(device))) for part in parts])

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> UInt8[np.ndarray, "B T H W 3"]:
        """Pictures of latents.

        Raises:
            SimForcingError: they are not finite, and would be black pictures.
        """
        if not bool(latents.isfinite().all()):
            raise SimForcingError(
                "the predicted latents hold NaN or infinite values, no video can be made of them; "
                "check the model's weights, or use a smaller w"
            )
        return torch.cat(
            [to_pixels(self.codec.decode(part)).cpu() for part in latents.tensor_split(_count(len(latents)))]
        ).numpy()

    def _firsts(self, start: Start, domain: Domain) -> tuple[Tensor, Tensor]:
        """Latent of the first frame, and the noise that a rollout from it starts with."""
        frames = start.real_first if domain == "real" else start.sim_first
        if frames is None:
            raise SimForcingError("predicting simulation needs its first frame; use w = 0, or a paired dataset")
        rule = self.preparation.rule
        first = self.encode(frames[:, None])
        count = self.codec.latent_shape(rule.frames, rule.height, rule.width)[1]
        return first, start_noise(first, count, list(start.seeds or ()))

    def _inputs(self, start: Start, domain: Domain) -> Inputs:
        action, proprio = self.preparation.normalise(start.action, start.proprio)
        return Inputs(action, proprio, *self.preparation.context(start.tasks, domain))


def _count(n: int) -> int:
    return max(1, -(-n // BATCH))
