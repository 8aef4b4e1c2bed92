"""From what cameras see, the robot's state and an instruction to actions in the units of the recordings.

Legend: B batch, H W pixels, A action steps, a action numbers, p state numbers, L context tokens, X text width.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, UInt8
from torch import Tensor

from simforcing.errors import InputError, SimForcingError, check_shape
from simforcing.policy.policy import Policy
from simforcing.policy.preparation import DOMAIN, PolicyPreparation
from simforcing.policy.sampler import Observation, SamplerConfig, remember, sample, start_noise

KNOWN_TEXTS = 1024
"""Instructions whose embeddings are kept."""


class Agent:
    """A policy with its codec and words. An instruction is embedded when it is first met.

    Raises:
        SimForcingError: the policy does not say what it looks at, or its codec is not to be had.
    """

    def __init__(self, policy: Policy) -> None:
        prepared = policy.preparation
        if not isinstance(prepared, PolicyPreparation) or not prepared.cameras:
            raise SimForcingError("this policy does not say which cameras it looks at; load one that was trained here")
        self.policy, self.preparation = policy, prepared
        self.codec = prepared.load_codec()
        self._texts: dict[str, tuple[Tensor, Tensor]] = {}

    def observation(
        self, images: Mapping[str, UInt8[np.ndarray, "B H W 3"]], state: Float[np.ndarray, "B p"], tasks: Sequence[str]
    ) -> Observation:
        """What the sampler takes.

        Raises:
            InputError: names what does not fit.
        """
        if not tasks:
            raise InputError("no observation: give at least one instruction, and as many images and states")
        picture = self.preparation.picture(images)
        if len(picture) != len(tasks):
            raise InputError(f"{len(tasks)} instructions for {len(picture)} pictures a camera; give one each")
        check_shape("state", state, [len(tasks), self.policy.config.proprio_dim])
        if not np.isfinite(state).all():
            raise InputError(f"state of shape {list(state.shape)} holds NaN or infinite values, it must be finite")
        device = self.policy.device
        with torch.inference_mode():
            first = self.codec.to(device).encode(picture[:, :, None].to(device))
        normalised = torch.from_numpy(self.preparation.state_stats.normalize(state))
        return Observation(first, *self._context(tasks), normalised)

    def act(
        self,
        images: Mapping[str, UInt8[np.ndarray, "B H W 3"]],
        state: Float[np.ndarray, "B p"],
        instruction: Sequence[str],
        seed: int | Sequence[int] = 0,
        steps: int = 10,
    ) -> Float32[np.ndarray, "B A a"]:
        """See `Policy.act`."""
        policy = self.policy.eval()
        observation = self.observation(images, state, instruction)
        seeds = [seed] * len(instruction) if isinstance(seed, int) else list(seed)
        noise = start_noise(policy, observation.first, seeds, video=policy.config.variant != "first-frame")
        sampled = sample(policy, remember(policy, observation), noise, SamplerConfig(steps))
        return self.preparation.action_stats.denormalize(sampled.action.cpu().numpy())

    def _context(self, tasks: Sequence[str]) -> tuple[Float[Tensor, "B L X"], Bool[Tensor, "B L"]]:
        for task in tasks:
            if task not in self._texts:
                if len(self._texts) >= KNOWN_TEXTS:
                    self._texts.pop(next(iter(self._texts)))
                self._texts[task] = self.preparation.context([task], DOMAIN)
        text, mask = zip(*(self._texts[task] for task in tasks), strict=True)
        return torch.cat(text), torch.cat(mask)
