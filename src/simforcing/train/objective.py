"""What is minimised: pure functions from a batch to named loss terms.

Legend: B batch, C channels, F latent frames, H W latent grid, A action steps, L context tokens, X text width.

Teacher and baseline: flow matching on one video. Student: flow matching on paired simulated and real video, plus
motion distillation: the frozen teacher, looking at the noisy simulation, supervises the differences between adjacent
frames of the estimated clean latents, x0 = x - sigma v, in both branches (SimForcing's latent-motion distillation).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.model.flow import noised
from simforcing.model.mixture import Condition
from simforcing.model.world_model import WorldModel

Latents = Float[Tensor, "B C F H W"]


@dataclass(frozen=True)
class ObjectiveConfig:
    """The paper's weights. Total: video_weight * 0.5 (real + syn_weight * syn) + motion_weight * the same of motion.

    clean_first_frame: the first latent frame is given, so its clean estimate is itself. False is the released
    behaviour: the estimate then holds the velocity of frame 0, which nothing trains (see docs/decisions.md).
    syn_share: share of each batch whose simulated branch is computed. Below 1 it estimates the same objective from
    fewer samples: with the paper's weights that branch is a tenth of the loss and 3/7 of a step's work.
    """

    video_weight: float = 1.0
    motion_weight: float = 0.5
    real_weight: float = 1.0
    syn_weight: float = 0.1
    retention: float = 0.7
    corrupt_probability: float = 0.4
    corrupt_keep: tuple[float, float] = (0.5, 0.9)
    corrupt_noise: tuple[float, float] = (0.1, 0.3)
    clean_first_frame: bool = True
    syn_share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("retention", "corrupt_probability", "syn_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise SimForcingError(f"{name} = {getattr(self, name)}: a probability lies between 0 and 1")


class Batch(NamedTuple):
    """Clean latents (of one domain, or paired), normalised actions and proprioception, text of the domain."""

    latents: Latents
    action: Float[Tensor, "B A a"]
    proprio: Float[Tensor, "B p"]
    text: Float[Tensor, "B L X"]
    text_mask: Bool[Tensor, "B L"]
    sim_latents: Latents | None = None  # the paired simulation, and the same instructions in its prompt
    sim_text: Float[Tensor, "B L X"] | None = None
    sim_text_mask: Bool[Tensor, "B L"] | None = None

    def simulated(self) -> "Batch":
        """The simulated side of a paired batch.

        Raises:
            SimForcingError: the batch is not paired.
        """
        if self.sim_latents is None or self.sim_text is None or self.sim_text_mask is None:
            raise SimForcingError("a student needs paired simulation latents; this batch has none")
        return Batch(self.sim_latents, self.action, self.proprio, self.sim_text, self.sim_text_mask)


class Draws(NamedTuple):
    """All randomness of one step, drawn in this order, so that a loss can be computed again."""

    noise: Latents
    timestep: Float32[Tensor, " B"]
    gate: Float32[Tensor, " B"]  # 1: this sample sees its simulation
    keep: Float32[Tensor, " B"]  # corruption of the simulation: keep * z + spread * noise
    spread: Float32[Tensor, " B"]
    corruption: Latents


def draw(model: WorldModel, latents: Latents, config: ObjectiveConfig, generator: torch.Generator) -> Draws:
    """Noise, times, condition dropout and corruption for one batch; the generator lives on the CPU."""
    batch = len(latents)

    def uniform(low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(batch, generator=generator)

    noise = torch.randn(latents.shape, generator=generator)
    timestep = model.flow.timestep(uniform())
    gate = (uniform() < config.retention).float()
    corrupt = uniform() < config.corrupt_probability
    keep = torch.where(corrupt, uniform(*config.corrupt_keep), torch.ones(batch))
    spread = (1 - keep) * uniform(*config.corrupt_noise)
    corruption = torch.randn(latents.shape, generator=generator)
    return Draws(*(t.to(latents.device) for t in (noise, timestep, gate, keep, spread, corruption)))


def noisy(clean: Latents, draws: Draws, flow_steps: int) -> Latents:
    """Noised latents whose first frame stays the clean condition."""
    x = noised(clean, draws.noise, draws.timestep / flow_steps)
    x[:, :, 0] = clean[:, :, 0]
    return x


def flow_error(velocity: Latents, clean: Latents, noise: Latents) -> Float[Tensor, " B"]:
    """Mean squared error of the velocity over the predicted frames (all but the first), one number a sample."""
    return (velocity - (noise - clean))[:, :, 1:].square().flatten(1).mean(1)


def motion(
    x: Latents, velocity: Latents, sigma: Float32[Tensor, " B"], clean: Latents | None
) -> Float[Tensor, "B C F-1 H W"]:
    """Differences between adjacent frames of the estimated clean latents; `clean` gives the known first frame."""
    estimate = x - sigma.view(-1, 1, 1, 1, 1) * velocity
    if clean is not None:
        estimate = torch.cat([clean[:, :, :1], estimate[:, :, 1:]], dim=2)
    return estimate.diff(dim=2)


def single_domain_loss(model: WorldModel, batch: Batch, draws: Draws) -> dict[str, Tensor]:
    """Flow matching on one video: teacher and baselines. Terms: `flow`, `total`."""
    clean = batch.latents
    velocity = model.denoise(noisy(clean, draws, model.flow.train_steps), draws.timestep, _condition(model, batch))
    loss = (model.flow.weight(draws.timestep) * flow_error(velocity, clean, draws.noise)).mean()
    return {"flow": loss, "total": loss}


def student_loss(
    model: WorldModel, teacher: WorldModel, batch: Batch, draws: Draws, config: ObjectiveConfig
) -> dict[str, Tensor]:
    """Joint flow matching on pairs with motion distillation.

    Both branches run as one batch, each under its domain's prompt. The teacher has weights of its own for all that it
    uses, its proprioception encoder included, and sees the prompt that it was trained with.

    Terms: `flow_real`, `flow_syn`, `motion_real`, `motion_syn` (weighted by noise level), `total`.
    """
    simulated = batch.simulated()
    real, syn = batch.latents, simulated.latents
    sigma = draws.timestep / model.flow.train_steps
    weight = model.flow.weight(draws.timestep)
    x_real, x_syn = (noisy(z, draws, model.flow.train_steps) for z in (real, syn))
    with torch.no_grad():
        v_teacher = teacher.denoise(x_syn, draws.timestep, _condition(teacher, simulated))
        known = syn if config.clean_first_frame else None
        target = motion(x_syn, v_teacher, sigma, known)

    shape = (-1, 1, 1, 1, 1)
    reference = draws.keep.view(shape) * syn + draws.spread.view(shape) * draws.corruption
    count = max(1, round(config.syn_share * len(syn)))
    some = Batch(*(part[:count] for part in simulated[:5]))
    pairs = Batch(*(torch.cat([a, b]) for a, b in zip(batch[:5], some[:5], strict=True)))
    gates = torch.cat([draws.gate, torch.zeros_like(draws.gate[:count])])
    condition = _condition(model, pairs, torch.cat([reference, reference[:count]]), gates)
    times = torch.cat([draws.timestep, draws.timestep[:count]])
    velocities = model.denoise(torch.cat([x_real, x_syn[:count]]), times, condition).split([len(real), count])
    terms: dict[str, Tensor] = {}
    for name, x, clean, velocity in zip(("real", "syn"), (x_real, x_syn), (real, syn), velocities, strict=True):
        n = len(velocity)
        terms[f"flow_{name}"] = (weight[:n] * flow_error(velocity, clean[:n], draws.noise[:n])).mean()
        delta = motion(x[:n], velocity, sigma[:n], clean[:n] if config.clean_first_frame else None)
        terms[f"motion_{name}"] = (weight[:n] * (delta - target[:n]).square().flatten(1).mean(1)).mean()
    flow = 0.5 * (config.real_weight * terms["flow_real"] + config.syn_weight * terms["flow_syn"])
    moved = 0.5 * (config.real_weight * terms["motion_real"] + config.syn_weight * terms["motion_syn"])
    return terms | {"total": config.video_weight * flow + config.motion_weight * moved}


def _condition(
    model: WorldModel,
    batch: Batch,
    sim_latents: Latents | None = None,
    gate: Float[Tensor, " B"] | None = None,
) -> Condition:
    context, mask = model.context(batch.text, batch.text_mask, batch.proprio)
    return model.condition(batch.action, context, mask, batch.latents.shape[2], sim_latents, gate)
