"""One sampler: Euler steps from noise to video, with guidance towards the simulation.

Legend: B batch, C channels, F latent frames, H W latent grid, A action steps, L context tokens, X text width.

Two stages. First the simulation is predicted from the simulated first frame and the actions; then the real video from
the real first frame, the actions and that simulation, with v = v_off + w (v_on - v_off). Text, action and simulation
features are computed once a rollout, both guidance branches run as one batch, w = 1 needs one branch and w = 0 needs
neither the simulation nor the second branch. The state stays float32.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.model.mixture import Condition
from simforcing.model.world_model import WorldModel

Latents = Float[Tensor, "B C F H W"]


@dataclass(frozen=True)
class Guidance:
    """How strongly the simulation is followed: 0 not at all, 1 as in training, between: the paper's mixture.

    kind `branches` mixes two velocities; `soft` runs one branch whose gate is w, at half the cost.
    """

    w: float = 0.6
    kind: Literal["branches", "soft"] = "branches"


@dataclass(frozen=True)
class Inputs:
    """What is given besides the first frame: normalised actions and proprioception, and text of the domain."""

    action: Float[Tensor, "B A a"]
    proprio: Float[Tensor, "B p"]
    text: Float[Tensor, "B L X"]
    text_mask: Bool[Tensor, "B L"]


def start_noise(first: Float[Tensor, "B C 1 H W"], frames: int, seeds: list[int]) -> Latents:
    """Noise of `frames` latent frames, one seed a clip, so that a clip's result does not depend on its batch.

    Both stages start from the same noise, as they were trained.
    """
    b, c, _, h, w = first.shape
    if len(seeds) != b:
        raise SimForcingError(f"{len(seeds)} seeds for {b} clips")
    noise = [torch.randn(c, frames, h, w, generator=torch.Generator().manual_seed(s)) for s in seeds]
    return torch.stack(noise).to(first.device)


@torch.inference_mode()
def sample(
    model: WorldModel,
    first: Float[Tensor, "B C 1 H W"],
    inputs: Inputs,
    noise: Latents,
    steps: int,
    sim_latents: Latents | None = None,
    guidance: Guidance = Guidance(w=0.0),
) -> Latents:
    """Denoises one video; its first latent frame is `first`, exactly. With w = 0 simulation is not looked at.

    Raises:
        SimForcingError: w is not 0 and there are no simulation latents, or the model cannot be conditioned on them.
    """
    if guidance.w != 0 and sim_latents is None:
        raise SimForcingError(f"w = {guidance.w} needs simulation latents; give them, or w = 0")
    context, mask = model.context(inputs.text, inputs.text_mask, inputs.proprio)
    condition = model.condition(inputs.action, context, mask, noise.shape[2])
    residuals = None if guidance.w == 0 else model.sim_residuals(sim_latents)
    two = residuals is not None and guidance.w != 1 and guidance.kind == "branches"
    if residuals is not None:
        if two:
            residuals = [torch.cat([torch.zeros_like(r), r]) for r in residuals]
        elif guidance.kind == "soft":
            residuals = [guidance.w * r for r in residuals]
        shared = condition.repeat(2) if two else condition
        condition = Condition(shared.text, shared.text_mask, shared.action, residuals)

    x = noise.clone()
    x[:, :, :1] = first
    schedule = model.flow.steps(steps)
    for t, delta in zip(schedule.timesteps.tolist(), schedule.deltas.tolist(), strict=True):
        state = x.repeat(2, 1, 1, 1, 1) if two else x
        velocity = model.denoise(state, torch.full((len(state),), t, device=x.device), condition)
        if two:
            off, on = velocity.chunk(2)
            velocity = off + guidance.w * (on - off)
        x = x + velocity * delta
        x[:, :, :1] = first
    return x


@dataclass(frozen=True)
class Rollout:
    """Predicted latents of both stages; `sim` is None where nothing needed it."""

    real: Latents
    sim: Latents | None


def two_stages(
    model: WorldModel,
    first_real: Float[Tensor, "B C 1 H W"],
    first_sim: Float[Tensor, "B C 1 H W"] | None,
    inputs: Inputs,
    sim_inputs: Inputs,
    noise: Latents,
    sim_steps: int = 1,
    real_steps: int = 10,
    guidance: Guidance = Guidance(),
    sim_model: WorldModel | None = None,
) -> Rollout:
    """Simulation (predicted by `sim_model`, default the model itself), then the real video under its guidance."""
    sim = None
    if guidance.w != 0:
        if first_sim is None:
            raise SimForcingError("w > 0 needs the simulated first frame; give one, or w = 0")
        sim = sample(sim_model or model, first_sim, sim_inputs, noise, sim_steps)
    return Rollout(sample(model, first_real, inputs, noise, real_steps, sim, guidance), sim)
