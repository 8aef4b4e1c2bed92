"""From what is seen to actions: Euler steps from noise, all that no step changes computed once.

Legend: B batch, C channels, F latent frames, H W latent grid, A action steps, a action numbers, L context tokens,
X text width, p proprioception.

The first frame passes the video expert once; its keys and values, and those of the text in both experts, serve every
step. A `first-frame` policy then computes actions alone; an `idm` one first imagines the video; a `joint` one does
both in step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from simforcing.errors import InputError, check_shape
from simforcing.model.checks import check_inputs
from simforcing.model.experts import KeysValues
from simforcing.model.flow import Flow, Steps
from simforcing.model.mixture import Condition
from simforcing.policy.policy import ActionCondition, Policy, check_actions, check_finite
from simforcing.train.objective import Latents


@dataclass(frozen=True)
class SamplerConfig:
    """Number of steps; `shift` of the schedule (None: the model's).

    float32_state: times, steps and what is passed from step to step are float32; False rounds them to the weights'
        dtype, as the released code does.
    """

    steps: int = 10
    shift: float | None = None
    float32_state: bool = True

    @classmethod
    def released(cls, **changes: Any) -> Self:
        """What the released code does (`compat="released"`)."""
        return cls(**{"float32_state": False} | changes)

    def schedule(self, policy: Policy) -> Steps:
        """Times and steps, for video and actions alike."""
        flow = policy.flow if self.shift is None else Flow(self.shift, policy.flow.train_steps)
        return flow.steps(self.steps, self.state(policy))

    def state(self, policy: Policy) -> torch.dtype:
        """Type of what is passed from step to step."""
        return torch.float32 if self.float32_state else policy.dtype


class Observation(NamedTuple):
    """The first frame's latent, the instruction, and normalised proprioception (None: no token for it)."""

    first: Float[Tensor, "B C 1 H W"]
    text: Float[Tensor, "B L X"]
    text_mask: Bool[Tensor, "B L"]
    proprio: Float[Tensor, "B p"] | None


@dataclass(frozen=True)
class Memory:
    """What a policy keeps of an observation; `known` holds the first frame's keys and values."""

    first: Float[Tensor, "B C 1 H W"]
    known: Condition
    actions: ActionCondition

    @property
    def seen(self) -> list[KeysValues]:
        """Keys and values of the first frame in every block."""
        assert self.known.before is not None
        return self.known.before


class Noise(NamedTuple):
    """Where denoising starts. A `first-frame` policy needs no video; with its noise it imagines one besides."""

    action: Float[Tensor, "B A a"]
    video: Latents | None = None


class Sampled(NamedTuple):
    """Normalised actions, and the imagined video (its first frame is the given one) where there is one."""

    action: Float32[Tensor, "B A a"]
    video: Latents | None


def start_noise(policy: Policy, first: Float[Tensor, "B C 1 H W"], seeds: Sequence[int], video: bool) -> Noise:
    """Noise of actions, then of video where it is wanted; one seed a sample, so that no sample depends on its batch.

    (The released code starts both from the same seed, hence from the same numbers.)
    """
    config = policy.config
    if len(seeds) != len(first):
        raise InputError(f"{len(seeds)} seeds for {len(first)} observations; give one each")
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    _, channels, _, height, width = first.shape

    def normal(*shape: int) -> Tensor:
        return torch.stack([torch.randn(shape, generator=g) for g in generators]).to(policy.device)

    action = normal(config.horizon, config.action_dim)
    return Noise(action, normal(channels, config.frames, height, width) if video else None)


@torch.inference_mode()
def remember(policy: Policy, observation: Observation) -> Memory:
    """Encodes an observation, for any number of calls of `sample`.

    Raises:
        InputError: names the argument that does not fit, or holds NaN.
    """
    first, text, mask, proprio = observation
    config = policy.config
    check_shape("first", first, ["B", config.channels, 1, "H", "W"])
    check_inputs(config, first.shape, None, text, mask, "text")
    check_finite("first", first)
    if proprio is None:
        context, mask = text, mask.cpu()
    else:
        check_shape("proprio", proprio, [len(first), config.proprio_dim])
        check_finite("proprio", proprio)
        context, mask = policy.context(text.to(policy.device), mask.cpu(), proprio)
    first = first.to(policy.device)
    condition = policy.condition(None, context, mask, (config.frames, *first.shape[3:]))
    return Memory(first, policy.remember_first(first, condition), policy.action_condition(context, condition))


@torch.inference_mode()
def sample(policy: Policy, memory: Memory, noise: Noise, config: SamplerConfig = SamplerConfig()) -> Sampled:
    """Denoises actions, and video where the variant looks at it or its noise is given.

    Raises:
        InputError: noise does not fit, or a variant that looks at video has none for it.
    """
    variant = policy.config.variant
    check_actions(policy.config, "action noise", noise.action, len(memory.first))
    if noise.video is None and variant != "first-frame":
        raise InputError(f"a policy of variant {variant} looks at the video that it imagines; give noise for it, too")
    if noise.video is not None:
        check_shape(
            "video noise", noise.video, [*memory.first.shape[:2], policy.config.frames, *memory.first.shape[3:]]
        )
    if variant == "joint" and noise.video is not None:
        return _in_step(policy, memory, noise.action, noise.video, config)
    video = None if noise.video is None else imagine(policy, memory, noise.video, config)
    seen = memory.seen
    if variant == "idm" and video is not None:
        _, seen = policy.watch(video[:, :, 1:], video.new_zeros(1), memory.known, predict=False)
    x, state = noise.action.to(config.state(policy)), config.state(policy)
    for t, delta in _steps(policy, config):
        x = (x + delta * policy.denoise_actions(x, t, memory.actions, seen)).to(state)
    return Sampled(x.float(), video)


@torch.inference_mode()
def imagine(policy: Policy, memory: Memory, noise: Latents, config: SamplerConfig = SamplerConfig()) -> Latents:
    """The video that the policy expects: its video expert alone, which sees no actions."""
    x, state = noise[:, :, 1:].to(config.state(policy)), config.state(policy)
    for t, delta in _steps(policy, config):
        x = (x + delta * policy.denoise(x, t, memory.known)).to(state)
    return torch.cat([memory.first.float(), x.float()], dim=2)


def _in_step(policy: Policy, memory: Memory, action: Tensor, video: Latents, config: SamplerConfig) -> Sampled:
    """Both at once: actions see the video as noisy as they are."""
    state = config.state(policy)
    a, x = action.to(state), video[:, :, 1:].to(state)
    for t, delta in _steps(policy, config):
        velocity, seen = policy.watch(x, t, memory.known)
        assert velocity is not None
        a = (a + delta * policy.denoise_actions(a, t, memory.actions, seen)).to(state)
        x = (x + delta * velocity).to(state)
    return Sampled(a.float(), torch.cat([memory.first.float(), x.float()], dim=2))


def _steps(policy: Policy, config: SamplerConfig) -> list[tuple[Float32[Tensor, "1"], float]]:
    """Time, on the policy's device, and length of every step."""
    timesteps, deltas = config.schedule(policy)
    return list(zip(timesteps.to(policy.device).split(1), deltas.tolist(), strict=True))
