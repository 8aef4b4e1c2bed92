"""What is minimised: pure functions from a batch to named loss terms.

Legend: B batch, C channels, F latent frames, H W latent grid, T pixel frames, A action steps, L context tokens,
X text width.

Teacher and baseline: flow matching on one video. Student: flow matching on paired simulated and real video, plus
motion distillation: the frozen teacher, looking at the noisy simulation, supervises the differences between adjacent
frames of the estimated clean latents, x0 = x - sigma v, in both branches (SimForcing's latent-motion distillation).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as functional
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from simforcing.errors import SimForcingError, check_shape
from simforcing.model.flow import noised
from simforcing.model.mixture import Condition
from simforcing.model.world_model import WorldModel
from simforcing.train.ranges import NOT_NEGATIVE

Latents = Float[Tensor, "B C F H W"]
WEIGHTS = (
    "video_weight",
    "motion_weight",
    "real_weight",
    "syn_weight",
    "motion_real_weight",
    "motion_syn_weight",
    "motion_when_conditioned",
)
"""Factors of loss terms: finite and not negative."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """The paper's weights; where the released code differs from what is right, a field says so and `released` sets it.

    Total: video_weight * 0.5 (real_weight * real + syn_weight * syn) of flow matching, plus motion_weight * the same
    of motion (with weights of its own where they are given).

    motion_target: `difference` of adjacent frames; `value` distils the estimates themselves (the paper's ablation).
    motion_sigma: weight of a noise level: the flow's `bell`, `low_noise` = 1 - sigma, or `flat` = 1.
    motion_pool: side of the squares of the latent grid that motion is averaged over before it is compared.
    motion_when_conditioned: factor of the real branch's motion loss on samples that see their simulation.
    condition_syn: the simulated branch sees the simulation as well (where the real one does).
    retention: probability of the real branch to see its simulation; corruption keeps `corrupt_keep` of it and adds
        (1 - keep) * `corrupt_noise` of noise.
    action_dropout, first_frame_dropout: of the student, teacher or baseline that trains, never of the frozen teacher.
        Dropped actions are zeros, which is also what action guidance contrasts with.
    syn_share: share of each batch whose simulated branch is computed. Below 1 it estimates the same objective from
        fewer samples: with the paper's weights that branch is a tenth of the loss and 3/7 of a step's work.

    Corrections, each False or `student` in the released code:
    clean_first_frame: the first latent frame is given, so its clean estimate is itself, not one that holds the
        velocity of frame 0, which nothing trains.
    own_teacher_proprio: the teacher embeds proprioception with its own weights, not with the student's.
    mask_motion: padded frames are left out of the motion loss, too.
    true_first_time: a first frame that is dropped, hence noisy, is embedded with the time that it has, not with 0.
    float32_time: times are drawn as float32, not rounded to the weights' dtype (bfloat16: steps of 4 from 512 on).
    """

    video_weight: float = 1.0
    motion_weight: float = 0.5
    real_weight: float = 1.0
    syn_weight: float = 0.1
    motion_real_weight: float | None = None
    motion_syn_weight: float | None = None
    motion_target: Literal["difference", "value"] = "difference"
    motion_sigma: Literal["bell", "low_noise", "flat"] = "bell"
    motion_pool: int = 1
    motion_when_conditioned: float = 1.0
    condition_syn: bool = False
    retention: float = 0.7
    corrupt_probability: float = 0.4
    corrupt_keep: tuple[float, float] = (0.5, 0.9)
    corrupt_noise: tuple[float, float] = (0.1, 0.3)
    action_dropout: float = 0.0
    first_frame_dropout: float = 0.0
    syn_share: float = 1.0
    clean_first_frame: bool = True
    own_teacher_proprio: bool = True
    mask_motion: bool = True
    true_first_time: bool = True
    float32_time: bool = True

    def __post_init__(self) -> None:
        for name in ("retention", "corrupt_probability", "syn_share", "action_dropout", "first_frame_dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise SimForcingError(f"{name} = {getattr(self, name)}: a probability lies between 0 and 1")
        if not 1 <= self.motion_pool < math.inf:
            raise SimForcingError(f"motion_pool = {self.motion_pool}: the side of a square, at least 1")
        for name in WEIGHTS:
            NOT_NEGATIVE.check(name, getattr(self, name))
        for name in ("corrupt_keep", "corrupt_noise"):
            low, high = getattr(self, name)
            if not 0 <= low <= high <= 1:
                raise SimForcingError(f"{name} = {low}, {high}: give two shares, 0 <= low <= high <= 1")

    @classmethod
    def released(cls, **changes: Any) -> Self:
        """The objective of the released code, its defects included (`compat="released"`)."""
        return cls(**changes).as_released()

    def as_released(self) -> Self:
        """These weights with the defects of the released code."""
        return replace(
            self,
            clean_first_frame=False,
            own_teacher_proprio=False,
            mask_motion=False,
            true_first_time=False,
            float32_time=False,
        )


class Batch(NamedTuple):
    """Clean latents (of one domain, or paired), normalised actions and proprioception, text of the domain.

    `sim_text` None: the paired simulation is described by the same text. Text masks are best kept on the host, where
    looking at them costs nothing.
    """

    latents: Latents
    action: Float[Tensor, "B A a"]
    proprio: Float[Tensor, "B p"]
    text: Float[Tensor, "B L X"]
    text_mask: Bool[Tensor, "B L"]
    sim_latents: Latents | None = None  # the paired simulation, and the same instructions in its prompt
    sim_text: Float[Tensor, "B L X"] | None = None
    sim_text_mask: Bool[Tensor, "B L"] | None = None
    padded: Bool[Tensor, "B F"] | None = None  # latent frames beyond the end of the episode

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device, its text masks on the host."""
        moved = {k: v.to(device, non_blocking=True) for k, v in self._asdict().items() if v is not None}
        return self._replace(**moved | {k: getattr(self, k) for k in ("text_mask", "sim_text_mask")})

    def simulated(self) -> "Batch":
        """The simulated side of a paired batch.

        Raises:
            SimForcingError: the batch is not paired.
        """
        if self.sim_latents is None:
            raise SimForcingError("a student needs paired simulation latents; this batch has none")
        text, mask = self.text, self.text_mask
        if self.sim_text is not None:
            text, mask = self.sim_text, self.sim_text_mask if self.sim_text_mask is not None else mask
        return Batch(self.sim_latents, self.action, self.proprio, text, mask, padded=self.padded)


def padded_frames(image_is_pad: Bool[Tensor, "B T"], stride: int = 4) -> Bool[Tensor, "B F"]:
    """Latent frames that hold nothing but padded pixel frames; the first never counts as one.

    Raises:
        InputError: T is not 1 + stride n.
    """
    count = -(-(image_is_pad.shape[1] - 1) // stride)
    check_shape("image_is_pad", image_is_pad, [len(image_is_pad), 1 + stride * count])
    later = image_is_pad[:, 1:].unflatten(1, (count, stride)).all(2)
    return torch.cat([torch.zeros_like(later[:, :1]), later], dim=1)


class Draws(NamedTuple):
    """All randomness of one step, drawn in this order, so that a loss can be computed again.

    `gate` stays on the host: what is projected and what is not is decided by it without waiting for a device.
    """

    noise: Latents
    timestep: Float32[Tensor, " B"]
    gate: Float32[Tensor, " B"]  # 1: this sample sees its simulation
    keep: Float32[Tensor, " B"]  # corruption of the simulation: keep * z + spread * noise
    spread: Float32[Tensor, " B"]
    corruption: Latents
    first_kept: Bool[Tensor, " B"] | None = None  # None: always
    action_kept: Bool[Tensor, " B"] | None = None

    def some(self, count: int) -> "Draws":
        """Those of the first samples."""
        return Draws(*(None if t is None else t[:count] for t in self))  # type: ignore[arg-type]


def draw(model: WorldModel, latents: Latents, config: ObjectiveConfig, generator: torch.Generator) -> Draws:
    """Noise, times, dropouts and corruption for one batch; the generator lives on the CPU."""
    batch = len(latents)

    def uniform(low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(batch, generator=generator)

    def kept(dropout: float) -> Tensor | None:
        return (uniform() >= dropout).to(latents.device) if dropout > 0 else None

    noise = torch.randn(latents.shape, generator=generator)
    timestep = model.flow.timestep(uniform())
    if not config.float32_time:
        timestep = timestep.to(model.dtype).float()
    first_kept, action_kept = kept(config.first_frame_dropout), kept(config.action_dropout)
    gate = (uniform() < config.retention).float()
    corrupt = uniform() < config.corrupt_probability
    keep = torch.where(corrupt, uniform(*config.corrupt_keep), torch.ones(batch))
    spread = (1 - keep) * uniform(*config.corrupt_noise)
    corruption = torch.randn(latents.shape, generator=generator)
    noise, timestep, keep, spread, corruption = (
        t.to(latents.device) for t in (noise, timestep, keep, spread, corruption)
    )
    return Draws(noise, timestep, gate, keep, spread, corruption, first_kept, action_kept)


def noisy(clean: Latents, draws: Draws, flow_steps: int, first_kept: Bool[Tensor, " B"] | None = None) -> Latents:
    """Noised latents whose first frame stays the clean condition, unless it is dropped."""
    x = noised(clean, draws.noise, draws.timestep / flow_steps)
    first = clean[:, :, :1]
    if first_kept is not None:
        first = torch.where(_column(first_kept), first, x[:, :, :1])
    return torch.cat([first, x[:, :, 1:]], dim=2)


def flow_error(
    velocity: Latents, clean: Latents, noise: Latents, padded: Bool[Tensor, "B F"] | None = None
) -> Float[Tensor, " B"]:
    """Mean squared error of the velocity over the predicted frames (all but the first), one number a sample."""
    error = (velocity - (noise - clean))[:, :, 1:].square().mean(dim=(1, 3, 4))
    return error.mean(1) if padded is None else _mean_of_unpadded(error, padded[:, 1:])


def estimate(
    x: Latents,
    velocity: Latents,
    sigma: Float32[Tensor, " B"],
    clean: Latents | None,
    first_kept: Bool[Tensor, " B"] | None = None,
) -> Latents:
    """Estimated clean latents; `clean` gives the known first frame."""
    found = x - _column(sigma) * velocity
    if clean is None:
        return found
    first = clean[:, :, :1]
    if first_kept is not None:
        first = torch.where(_column(first_kept), first, found[:, :, :1])
    return torch.cat([first, found[:, :, 1:]], dim=2)


def motion_error(
    found: Latents, target: Latents, config: ObjectiveConfig, padded: Bool[Tensor, "B F"] | None = None
) -> Float[Tensor, " B"]:
    """Mean squared difference of the motion in two estimates, over all adjacent frames; one number a sample."""
    error = found - target  # differencing and pooling are linear: once, on the difference
    if config.motion_target == "difference":
        error = error.diff(dim=2)
    if config.motion_pool > 1:
        side = config.motion_pool
        error = functional.avg_pool3d(error, (1, side, side))
    error = error.square().mean(dim=(1, 3, 4))
    if padded is None or not config.mask_motion:
        return error.mean(1)
    return _mean_of_unpadded(error, padded[:, -error.shape[1] :])


def single_domain_loss(
    model: WorldModel, batch: Batch, draws: Draws, config: ObjectiveConfig = ObjectiveConfig()
) -> dict[str, Tensor]:
    """Flow matching on one video: teacher and baselines. Terms: `flow`, `total`."""
    clean = batch.latents
    x = noisy(clean, draws, model.flow.train_steps, draws.first_kept)
    condition = _condition(model, _dropped(batch, draws))
    velocity = model.denoise(x, draws.timestep, condition, _first_clean(draws.first_kept, config))
    error = flow_error(velocity, clean, draws.noise, batch.padded)
    loss = (model.flow.weight(draws.timestep) * error).mean()
    return {"flow": loss, "total": loss}


def student_loss(
    model: WorldModel, teacher: WorldModel, batch: Batch, draws: Draws, config: ObjectiveConfig
) -> dict[str, Tensor]:
    """Joint flow matching on pairs with motion distillation.

    Both branches run as one batch, each under its domain's prompt; where both have the same one, text and actions are
    embedded once. The teacher sees the undropped actions and the prompt that it was trained with.

    Terms: `flow_real`, `flow_syn`, `motion_real`, `motion_syn` (weighted by noise level), `total`.
    """
    simulated = batch.simulated()
    count = max(1, round(config.syn_share * len(batch.latents)))
    sigma = draws.timestep / model.flow.train_steps
    target = _taught(model, teacher, simulated, draws, config)
    x_real, x_syn = (noisy(z, draws, model.flow.train_steps, draws.first_kept) for z in (batch[0], simulated[0]))
    condition = _pair_condition(model, batch, simulated, draws, config, count)
    both = torch.cat([draws.timestep, draws.timestep[:count]])
    kept = None if draws.first_kept is None else torch.cat([draws.first_kept, draws.first_kept[:count]])
    x = torch.cat([x_real, x_syn[:count]])
    velocities = model.denoise(x, both, condition, _first_clean(kept, config)).split([len(x_real), count])

    weight = model.flow.weight(draws.timestep)
    motion_weight = {"bell": weight, "low_noise": 1 - sigma, "flat": torch.ones_like(sigma)}[config.motion_sigma]
    terms: dict[str, Tensor] = {}
    sides = (("real", x_real, batch.latents), ("syn", x_syn, simulated.latents))
    for (name, x, clean), velocity in zip(sides, velocities, strict=True):
        n = len(velocity)
        padded = None if batch.padded is None else batch.padded[:n]
        terms[f"flow_{name}"] = (weight[:n] * flow_error(velocity, clean[:n], draws.noise[:n], padded)).mean()
        known = clean[:n] if config.clean_first_frame else None
        first_kept = None if draws.first_kept is None else draws.first_kept[:n]
        error = motion_error(estimate(x[:n], velocity, sigma[:n], known, first_kept), target[:n], config, padded)
        if name == "real" or config.condition_syn:
            seen = draws.gate[:n].to(error.device, non_blocking=True)
            error = error * (1 + (config.motion_when_conditioned - 1) * seen)
        terms[f"motion_{name}"] = (motion_weight[:n] * error).mean()
    return terms | {"total": _total(terms, config)}


def _total(terms: dict[str, Tensor], config: ObjectiveConfig) -> Tensor:
    real, syn = config.real_weight, config.syn_weight
    flow = 0.5 * (real * terms["flow_real"] + syn * terms["flow_syn"])
    real = real if config.motion_real_weight is None else config.motion_real_weight
    syn = syn if config.motion_syn_weight is None else config.motion_syn_weight
    motion = 0.5 * (real * terms["motion_real"] + syn * terms["motion_syn"])
    return config.video_weight * flow + config.motion_weight * motion


@torch.no_grad()
def _taught(model: WorldModel, teacher: WorldModel, simulated: Batch, draws: Draws, config: ObjectiveConfig) -> Latents:
    """The teacher's estimate of the clean simulation."""
    x = noisy(simulated.latents, draws, model.flow.train_steps)

    def velocity_of(teacher: WorldModel) -> Latents:
        context, mask = (teacher if config.own_teacher_proprio else model).context(*simulated[3:5], simulated.proprio)
        condition = teacher.condition(simulated.action, context, mask, x.shape[2:])
        return teacher.denoise(x, draws.timestep, condition)

    velocity = teacher.run(velocity_of)
    known = simulated.latents if config.clean_first_frame else None
    return estimate(x, velocity, draws.timestep / model.flow.train_steps, known)


def _pair_condition(
    model: WorldModel, batch: Batch, simulated: Batch, draws: Draws, config: ObjectiveConfig, count: int
) -> Condition:
    """Condition of the real samples, then of the first `count` simulated ones."""
    real = _dropped(batch, draws)
    rows = torch.cat([torch.arange(len(real.latents)), torch.arange(count)])
    if batch.sim_text is None:  # one text: embed it and the actions once
        condition = _condition(model, real).take(rows.to(real.latents.device, non_blocking=True))
    else:
        some = (part[:count] for part in _dropped(simulated, draws)[1:5])
        pairs = (torch.cat([a, b]) for a, b in zip(real[1:5], some, strict=True))
        condition = _condition(model, Batch(real.latents, *pairs))
    reference = _column(draws.keep) * simulated.latents + _column(draws.spread) * draws.corruption
    syn_gate = draws.gate[:count] if config.condition_syn else torch.zeros(count)
    gates = torch.cat([draws.gate, syn_gate.to(draws.gate)])
    return replace(condition, sim=model.sim_residuals(torch.cat([reference, reference[:count]]), gates))


def _condition(model: WorldModel, batch: Batch) -> Condition:
    context, mask = model.context(batch.text, batch.text_mask, batch.proprio)
    return model.condition(batch.action, context, mask, batch.latents.shape[2:])


def _dropped(batch: Batch, draws: Draws) -> Batch:
    """The batch with its dropped actions at zero."""
    if draws.action_kept is None:
        return batch
    return batch._replace(action=batch.action * draws.action_kept[:, None, None])


def _first_clean(first_kept: Tensor | None, config: ObjectiveConfig) -> bool | Tensor:
    return True if first_kept is None or not config.true_first_time else first_kept


def _column(numbers: Tensor) -> Tensor:
    """One number a sample, beside its latents."""
    return numbers.view(-1, 1, 1, 1, 1)


def _mean_of_unpadded(error: Float[Tensor, "B n"], padded: Bool[Tensor, "B n"]) -> Float[Tensor, " B"]:
    valid = (~padded).to(error)
    return (error * valid).sum(1) / valid.sum(1).clamp(min=1)
