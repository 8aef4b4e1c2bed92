"""One sampler: steps from noise to video, with guidance towards the simulation and the actions.

Legend: B batch, C channels, F latent frames, H W latent grid, A action steps, L context tokens, X text width.

Two stages. First the simulation is predicted from the simulated first frame and the actions; then the real video from
the real first frame, the actions and that simulation, with v = v_off + w (v_on - v_off). Whatever no denoising step
changes is computed once a rollout: keys and values of text, actions and first frame, and the simulation residuals.
All guidance branches run as one batch; w = 1 needs one branch, w = 0 needs neither the simulation nor a second branch.
The state stays float32 whatever the weights are. Where the released code computes something else, `SamplerConfig`
has a field for it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from simforcing.errors import InputError, SimForcingError, check_shape
from simforcing.model.checks import check_inputs
from simforcing.model.flow import Flow, Steps
from simforcing.model.mixture import Condition, stacked
from simforcing.model.sim_condition import SimResiduals
from simforcing.model.world_model import WorldModel

Latents = Float[Tensor, "B C F H W"]
Solver: TypeAlias = Literal["euler", "midpoint", "heun"]


@dataclass(frozen=True)
class Guidance:
    """How strongly the simulation is followed: 0 not at all, 1 as in training, between: the paper's mixture.

    kind: `branches` mixes two velocities; `soft` runs one branch whose gate is w, at half the cost.
    action: 1 takes the velocity as it is; more moves it away from what zero actions would give.
    noise: noise levels, both ends included, at which the simulation is followed; at others w is 0. Not the paper's:
        there it is all of them.
    """

    w: float = 0.6
    kind: Literal["branches", "soft"] = "branches"
    action: float = 1.0
    noise: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        for name, value in (("w", self.w), ("action", self.action)):
            if not math.isfinite(value):
                raise InputError(f"guidance {name} is {value}, it must be a finite number, such as 0.6")
        if not 0 <= self.noise[0] < self.noise[1] <= 1:
            raise SimForcingError(f"guidance at noise {self.noise}: give two levels, 0 <= low < high <= 1")

    def at(self, level: float) -> "Guidance":
        """What holds at a noise level in [0, 1]."""
        return self if self.noise[0] <= level <= self.noise[1] else replace(self, w=0.0)

    def branches(self) -> list["Branch"]:
        """The velocities that are needed, and how much of each."""
        if self.kind == "soft" or self.w in (0, 1):
            shares = {self.w if self.kind == "soft" else float(self.w): 1.0}
        else:
            shares = {0.0: 1 - self.w, 1.0: self.w}
        found = [Branch(share, gate) for gate, share in shares.items()]
        if self.action == 1:
            return found
        strongest = found[-1]
        found[-1] = Branch(strongest.share + self.action - 1, strongest.gate)
        return [*found, Branch(1 - self.action, strongest.gate, zero_action=True)]


@dataclass(frozen=True)
class Branch:
    """One velocity of a guided mixture."""

    share: float
    gate: float  # of the simulation
    zero_action: bool = False


@dataclass(frozen=True)
class SamplerConfig:
    """The schedule and its solver, and two corrections, each False in the released code.

    shift: of the schedule; None takes the model's.
    solver: `euler`, the paper's, looks once a step; `midpoint` and `heun` are of second order and look twice (`heun`
        once in its last step, since what it would look at there has no noise left).
    true_first_time: a first frame that is not given, hence noisy, is embedded with the time that it has, not with 0.
    float32_state: times, steps and what is passed from step to step are float32, not rounded to the weights' dtype.
    """

    shift: float | None = None
    solver: Solver = "euler"
    true_first_time: bool = True
    float32_state: bool = True

    @classmethod
    def released(cls, **changes: Any) -> Self:
        """What the released code does (`compat="released"`), less its work at w = 0, which changes nothing."""
        return cls(**{"true_first_time": False, "float32_state": False} | changes)


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
def shared_condition(model: WorldModel, inputs: Inputs, shape: torch.Size) -> Condition:
    """Text and actions for latents of this shape [B, C, F, H, W]; may serve several calls of `sample`.

    Raises:
        InputError: names the argument that does not fit.
    """
    check_shape("proprio", inputs.proprio, [shape[0], model.config.proprio_dim])
    check_inputs(model.config, shape, inputs.action, inputs.text, inputs.text_mask, "text")
    context, mask = model.context(inputs.text, inputs.text_mask.cpu(), inputs.proprio)
    return model.condition(inputs.action, context, mask, shape[2:])


@torch.inference_mode()
def sample(
    model: WorldModel,
    first: Float[Tensor, "B C 1 H W"] | None,
    inputs: Inputs,
    noise: Latents,
    steps: int,
    sim_latents: Latents | None = None,
    guidance: Guidance = Guidance(w=0.0),
    config: SamplerConfig = SamplerConfig(),
    condition: Condition | None = None,
) -> Float32[Tensor, "B C F H W"]:
    """Denoises one video; its first latent frame is `first`, exactly. With w = 0 simulation is not looked at.

    first: None lets the first frame be denoised like the others.
    condition: what `shared_condition` gave for these inputs, if it is at hand.

    Raises:
        InputError: shapes do not fit, or w is not 0 and there are no simulation latents.
        SimForcingError: the model cannot be conditioned on simulation.
    """
    if guidance.w != 0 and sim_latents is None:
        raise InputError(f"w = {guidance.w} needs simulation latents; give them, or w = 0")
    check_shape("noise", noise, ["B", model.config.channels, "F", "H", "W"])
    if first is not None:
        check_shape("first", first, [*noise.shape[:2], 1, *noise.shape[3:]])
    if sim_latents is not None:
        check_shape("sim_latents", sim_latents, noise.shape)
    given = condition or shared_condition(model, inputs, noise.shape)
    state = torch.float32 if config.float32_state else model.dtype
    flow = model.flow if config.shift is None else Flow(config.shift, model.flow.train_steps)
    clean = first is not None or not config.true_first_time
    fields: dict[Guidance, _Field] = {}

    def velocity(x: Tensor, timestep: float) -> Tensor:
        at = guidance.at(timestep / flow.train_steps)
        if at not in fields:
            fields[at] = _field(model, given, inputs, noise, first, at, sim_latents, clean)
        return fields[at](x, timestep)

    causal = first is not None and given.first_frame_causal
    x = (noise[:, :, 1:] if causal else noise).to(state).contiguous()
    x = solved(x, velocity, flow.steps(steps, state), config.solver)
    if first is None:
        return x.float()
    return torch.cat([first.float(), (x if causal else x[:, :, 1:]).float()], dim=2)


_Field: TypeAlias = Callable[[Tensor, float], Tensor]
"""Velocity of a state [B C F H W] at a timestep in [0, 1000]."""


def _field(
    model: WorldModel,
    given: Condition,
    inputs: Inputs,
    noise: Latents,
    first: Float[Tensor, "B C 1 H W"] | None,
    guidance: Guidance,
    sim_latents: Latents | None,
    clean: bool,
) -> _Field:
    """The guided velocity; whatever no step changes is computed here, once."""
    branches = guidance.branches()
    ready = _guided(model, given, inputs, noise.shape, branches, sim_latents)
    shares = noise.new_tensor([b.share for b in branches]).view(-1, 1, 1, 1, 1, 1)
    if first is not None and ready.first_frame_causal:
        ready = model.remember_first(first, ready)

    def velocity(x: Tensor, timestep: float) -> Tensor:
        if first is not None and not ready.knows_first:
            x = torch.cat([first.to(x), x[:, :, 1:]], dim=2)
        found = model.denoise(x, torch.full((1,), timestep, device=x.device), ready, first_frame_clean=clean)
        mixed: Tensor = (shares * found.unflatten(0, (len(branches), -1))).sum(0)
        return mixed

    return velocity


def solved(x: Latents, velocity: _Field, steps: Steps, solver: Solver) -> Latents:
    """The state after all steps, kept in its own dtype from one to the next; `velocity` takes it and a timestep."""
    state, times = x.dtype, [*steps.timesteps.tolist(), 0.0]
    for i, delta in enumerate(steps.deltas.tolist()):
        v = velocity(x, times[i])
        if solver == "midpoint":
            v = velocity((x + 0.5 * delta * v).to(state), (times[i] + times[i + 1]) / 2)
        elif solver == "heun" and i + 1 < len(steps.deltas):
            v = (v + velocity((x + delta * v).to(state), times[i + 1])) / 2
        x = (x + delta * v).to(state)
    return x


def _guided(
    model: WorldModel,
    given: Condition,
    inputs: Inputs,
    shape: torch.Size,
    branches: list[Branch],
    sim_latents: Latents | None,
) -> Condition:
    """The conditions of all branches in one, residuals only where a branch looks at the simulation."""
    zero = None
    if any(b.zero_action for b in branches):
        without = Inputs(torch.zeros_like(inputs.action), inputs.proprio, inputs.text, inputs.text_mask)
        zero = shared_condition(model, without, shape)
    parts = [zero if b.zero_action and zero is not None else given for b in branches]
    gates = [b.gate for b in branches if b.gate]
    if not gates:
        return stacked(parts, None)
    found = model.sim_residuals(sim_latents)
    assert found is not None
    batch = shape[0]
    rows = torch.cat([torch.arange(i * batch, (i + 1) * batch) for i, b in enumerate(branches) if b.gate])
    values = [torch.cat([v if g == 1 else g * v for g in gates]) for v in found.values]
    every = len(gates) == len(branches)
    return stacked(parts, SimResiduals(values, None if every else rows.to(values[0].device)))


@dataclass(frozen=True)
class Rollout:
    """Predicted latents of both stages; `sim` is None where nothing needed it."""

    real: Latents
    sim: Latents | None


@torch.inference_mode()
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
    config: SamplerConfig = SamplerConfig(),
) -> Rollout:
    """Simulation (predicted by `sim_model`, default the model itself), then the real video under its guidance.

    Where both stages have the same inputs (the same object), text and actions are embedded once for both.
    """
    if guidance.w == 0:
        return Rollout(sample(model, first_real, inputs, noise, real_steps, None, guidance, config), None)
    if first_sim is None:
        raise InputError("w > 0 needs the simulated first frame; give one, or w = 0")
    one = sim_inputs is inputs and sim_model in (None, model)
    shared = shared_condition(model, inputs, noise.shape) if one else None
    sim = sample(sim_model or model, first_sim, sim_inputs, noise, sim_steps, config=config, condition=shared)
    return Rollout(sample(model, first_real, inputs, noise, real_steps, sim, guidance, config, shared), sim)
