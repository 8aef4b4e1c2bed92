"""From pictures and stored actions to predicted pictures: codec, preparation and both sampling stages.

Legend: B batch, T frames, A actions, H W pixels, C F h w latents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.model.codec import Codec, to_pixels, to_unit
from simforcing.model.preparation import Preparation
from simforcing.model.text import Domain
from simforcing.model.world_model import WorldModel
from simforcing.predict.sampler import Guidance, Inputs, sample, start_noise

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
        self.codec = self.preparation.load_codec() if codec is None else codec

    def predict(self, start: Start, w: float = 0.6, sim_steps: int = 1, real_steps: int = 10) -> Prediction:
        """Both stages: the simulation, then the real video under it; w = 0 leaves the simulation out."""
        sim = None if w == 0 else self.simulation(start, sim_steps)
        real = self.decode(self.real(start, real_steps, sim, Guidance(w)))
        return Prediction(real, None if sim is None else self.decode(sim))

    def simulation(self, start: Start, steps: int) -> Tensor:
        """Predicted simulation latents [B, C, F, h, w].

        Raises:
            SimForcingError: there is no simulated first frame.
        """
        if start.sim_first is None:
            raise SimForcingError("predicting simulation needs its first frame; use w = 0, or a paired dataset")
        parts = []
        for piece in _pieces(start):
            assert piece.sim_first is not None
            first = self._first(piece.sim_first)
            parts.append(sample(self.model, first, self._inputs(piece, "sim"), self._noise(piece, first), steps))
        return torch.cat(parts)

    def real(self, start: Start, steps: int, sim: Tensor | None = None, guidance: Guidance = Guidance(w=0.0)) -> Tensor:
        """Predicted real latents [B, C, F, h, w], conditioned on simulation latents from wherever they come."""
        parts, done = [], 0
        for piece in _pieces(start):
            first = self._first(piece.real_first)
            reference = None if sim is None else sim[done : done + len(piece)]
            noise = self._noise(piece, first)
            parts.append(sample(self.model, first, self._inputs(piece, "real"), noise, steps, reference, guidance))
            done += len(piece)
        return torch.cat(parts)

    @torch.inference_mode()
    def encode(self, frames: UInt8[np.ndarray, "B T H W 3"]) -> Tensor:
        """Latents of videos."""
        return torch.cat(
            [self.codec.encode(to_unit(torch.from_numpy(part))) for part in np.array_split(frames, _count(len(frames)))]
        )

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> UInt8[np.ndarray, "B T H W 3"]:
        """Pictures of latents."""
        return torch.cat(
            [to_pixels(self.codec.decode(part)) for part in latents.tensor_split(_count(len(latents)))]
        ).numpy()

    def _first(self, frames: UInt8[np.ndarray, "B H W 3"]) -> Tensor:
        rule = self.preparation.rule
        if frames.shape[1:] != (rule.height, rule.width, 3):
            raise SimForcingError(
                f"first frames are {frames.shape[1]}x{frames.shape[2]}; the model takes {rule.height}x{rule.width}"
            )
        return self.encode(frames[:, None])

    def _inputs(self, start: Start, domain: Domain) -> Inputs:
        expected = self.preparation.rule.actions
        if start.action.shape[1] != expected:
            raise SimForcingError(f"{start.action.shape[1]} actions: the model takes {expected} a clip")
        action, proprio = self.preparation.normalise(start.action, start.proprio)
        return Inputs(action, proprio, *self.preparation.context(start.tasks, domain))

    def _noise(self, start: Start, first: Tensor) -> Tensor:
        rule = self.preparation.rule
        frames = self.codec.latent_shape(rule.frames, rule.height, rule.width)[1]
        return start_noise(first, frames, list(start.seeds or ()))


def _pieces(start: Start) -> list[Start]:
    return [start.part(slice(i, i + BATCH)) for i in range(0, len(start), BATCH)]


def _count(n: int) -> int:
    return max(1, -(-n // BATCH))
