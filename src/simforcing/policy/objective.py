"""What a policy minimises: pure functions from a batch to named loss terms.

Legend: B batch, C channels, F latent frames, H W latent grid, A action steps, a action numbers, L context tokens,
X text width, p proprioception.

Flow matching of actions, and of the video whose first frame is given; each has its own noise and time. (FastWAM.)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from simforcing.errors import InputError, SimForcingError, check_shape
from simforcing.model.checks import check_inputs
from simforcing.model.experts import KeysValues
from simforcing.model.flow import noised
from simforcing.model.mixture import Condition
from simforcing.policy.policy import Policy, PolicyConfig, check_actions, check_finite
from simforcing.train.objective import Latents


@dataclass(frozen=True)
class PolicyObjective:
    """Total: video_weight * video + action_weight * action. A weight of 0 leaves the term, and its work, out.

    watched_noise: of the `idm` variant, the probability that the copy of the video that actions see is noisy, too.
    video_gradient: False computes what actions see of the video without gradients. A frozen video expert has none of
        its own, but the proprioception token passes through it: that path is then lost.
    float32_time: times are drawn as float32; False rounds them to the weights' dtype, as the released code does.
    """

    video_weight: float = 1.0
    action_weight: float = 1.0
    watched_noise: float = 0.5
    video_gradient: bool = True
    float32_time: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.watched_noise <= 1:
            raise SimForcingError(f"watched_noise = {self.watched_noise}: a probability lies between 0 and 1")
        if min(self.video_weight, self.action_weight) < 0 or self.action_weight == 0:
            raise SimForcingError(
                f"video_weight = {self.video_weight}, action_weight = {self.action_weight}: the first is at least 0, "
                "the second above 0"
            )
        if self.video_weight and not self.video_gradient:
            raise SimForcingError("a video loss needs its gradient: video_gradient = false goes with video_weight = 0")


class Batch(NamedTuple):
    """Clean latents, normalised actions, proprioception of the first step, text.

    Where nothing but the first frame is looked at (`first-frame` without a video loss), one latent frame is enough.
    The text mask is best kept on the host, where looking at it costs nothing.
    """

    latents: Latents
    action: Float[Tensor, "B A a"]
    proprio: Float[Tensor, "B p"]
    text: Float[Tensor, "B L X"]
    text_mask: Bool[Tensor, "B L"]
    padded: Bool[Tensor, "B F"] | None = None  # latent frames beyond the end of the episode
    action_padded: Bool[Tensor, "B A"] | None = None  # action steps beyond the end of the episode


def check_batch(config: PolicyConfig, batch: Batch, objective: PolicyObjective = PolicyObjective()) -> None:
    """Compares a batch with the policy's sizes. Looks at values, so it waits for the device.

    Raises:
        InputError: names the argument, what it is and what it must be.
    """
    check_inputs(config, batch.latents.shape, None, batch.text, batch.text_mask, "text")
    rows, _, frames = batch.latents.shape[:3]
    first_alone = config.variant == "first-frame" and objective.video_weight == 0
    if frames != config.frames and not (frames == 1 and first_alone):
        raise InputError(f"latents have {frames} frames, they must have {config.frames}")
    check_finite("latents", batch.latents)
    check_actions(config, "action", batch.action, rows)
    check_shape("proprio", batch.proprio, [rows, config.proprio_dim])
    check_finite("proprio", batch.proprio)
    if batch.padded is not None:
        check_shape("padded", batch.padded, [rows, frames])
    if batch.action_padded is not None:
        check_shape("action_padded", batch.action_padded, [rows, config.horizon])


class Draws(NamedTuple):
    """All randomness of one step, drawn in this order, so that a loss can be computed again.

    Of the copy of the video that the actions of an `idm` policy see: `watched_timestep` is 0 where it is clean.
    """

    noise: Latents
    timestep: Float32[Tensor, " B"]
    action_noise: Float[Tensor, "B A a"]
    action_timestep: Float32[Tensor, " B"]
    watched_timestep: Float32[Tensor, " B"] | None = None
    watched_noise: Latents | None = None


def draw(model: Policy, batch: Batch, config: PolicyObjective, generator: torch.Generator) -> Draws:
    """Noise and times for one batch; the generator lives on the CPU."""
    device, rows = batch.latents.device, len(batch.latents)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(device)

    def time() -> Tensor:
        found = model.flow.timestep(torch.rand(rows, generator=generator))
        return (found if config.float32_time else found.to(model.dtype).float()).to(device)

    both = normal(batch.latents), time(), normal(batch.action), time()
    if model.config.variant != "idm":
        return Draws(*both)
    noisy = (torch.rand(rows, generator=generator) < config.watched_noise).to(device)
    return Draws(*both, torch.where(noisy, time(), 0.0), normal(batch.latents))


class Predicted(NamedTuple):
    """Velocities: of the latent frames after the first (None: not asked for), and of the actions."""

    video: Latents | None
    action: Float32[Tensor, "B A a"]


def predicted(model: Policy, batch: Batch, draws: Draws, config: PolicyObjective = PolicyObjective()) -> Predicted:
    """What both experts say to a noisy batch."""
    context, mask = model.context(batch.text, batch.text_mask, batch.proprio)
    condition = model.condition(None, context, mask, batch.latents.shape[2:])
    with torch.set_grad_enabled(torch.is_grad_enabled() and config.video_gradient):
        known = model.remember_first(batch.latents[:, :, :1], condition)
        velocity, seen = _watched(model, batch.latents, draws, known, config.video_weight > 0)
    action = noised(batch.action, draws.action_noise, draws.action_timestep / model.flow.train_steps)
    about = model.action_condition(context, condition)
    return Predicted(velocity, model.denoise_actions(action, draws.action_timestep, about, seen))


def _watched(
    model: Policy, clean: Latents, draws: Draws, known: Condition, predict: bool
) -> tuple[Latents | None, list[KeysValues]]:
    """Velocity of the later frames where it is wanted, and what the actions see of the video."""
    assert known.before is not None
    steps, variant = model.flow.train_steps, model.config.variant

    def later(noise: Latents, timestep: Tensor) -> Latents:
        return noised(clean, noise, timestep / steps)[:, :, 1:]

    if variant == "joint":
        return model.watch(later(draws.noise, draws.timestep), draws.timestep, known, predict)
    velocity = model.denoise(later(draws.noise, draws.timestep), draws.timestep, known) if predict else None
    if variant == "first-frame":
        return velocity, known.before
    if draws.watched_timestep is None or draws.watched_noise is None:
        raise InputError("an idm policy needs draws for the copy of the video that actions see; use `draw`")
    copy = later(draws.watched_noise, draws.watched_timestep)
    return velocity, model.watch(copy, draws.watched_timestep, known, predict=False)[1]


def video_error(
    velocity: Latents, clean: Latents, noise: Latents, padded: Bool[Tensor, "B F"] | None = None
) -> Float[Tensor, " B"]:
    """Mean squared error over the frames after the first, which `velocity` consists of; one number a sample."""
    error = (velocity - (noise - clean)[:, :, 1:]).square().mean(dim=(1, 3, 4))
    return _mean_of_unpadded(error, None if padded is None else padded[:, 1:])


def action_error(
    velocity: Float[Tensor, "B A a"],
    clean: Float[Tensor, "B A a"],
    noise: Float[Tensor, "B A a"],
    padded: Bool[Tensor, "B A"] | None = None,
) -> Float[Tensor, " B"]:
    """Mean squared error over the steps that are not padded, one number a sample; 0 where all are."""
    return _mean_of_unpadded((velocity - (noise - clean)).square().mean(dim=2), padded)


def policy_loss(
    model: Policy, batch: Batch, draws: Draws, config: PolicyObjective = PolicyObjective()
) -> dict[str, Tensor]:
    """Terms: `video` (where it has a weight), `action` (weighted by noise level, without their own weights), `total`.

    A sample whose actions are all padded adds nothing to `action` but counts in the mean.
    """
    found = predicted(model, batch, draws, config)
    error = action_error(found.action, batch.action, draws.action_noise, batch.action_padded)
    terms = {"action": (model.flow.weight(draws.action_timestep) * error).mean()}
    total = config.action_weight * terms["action"]
    if found.video is not None:
        error = video_error(found.video, batch.latents, draws.noise, batch.padded)
        terms["video"] = (model.flow.weight(draws.timestep) * error).mean()
        total = total + config.video_weight * terms["video"]
    return terms | {"total": total}


def _mean_of_unpadded(error: Float[Tensor, "B n"], padded: Bool[Tensor, "B n"] | None) -> Float[Tensor, " B"]:
    if padded is None:
        return error.mean(1)
    valid = (~padded).to(error)
    return (error * valid).sum(1) / valid.sum(1).clamp(min=1)
