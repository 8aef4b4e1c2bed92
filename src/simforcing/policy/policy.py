"""`Policy`: what should the arm do, given what the camera sees?

Legend: B batch, C channels, F latent frames, H W latent grid, A action steps, a action numbers, L context tokens,
X text width, h heads, d head width, S video tokens.

The two experts of a world model with the direction of sight reversed: actions see video, video never sees actions.
Actions are noisy and have a flow time of their own, one for all steps; the action expert's head gives their velocity
from the last block's tokens, without a norm. (FastWAM's policy.) Three variants say what actions see:

- `first-frame`: the first latent frame, which is clean. Nothing of it changes while actions are denoised.
- `joint`: all latent frames, which are denoised in step with the actions.
- `idm` (inverse dynamics): all latent frames, once they are denoised. In training a second copy of the video takes
  their place, half of the time clean.

No variant needs a mask: video tokens are computed first, without looking at actions, and every action sees all keys
and values that it is given.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self, get_args

import numpy as np
import torch
from jaxtyping import Bool, Complex64, Float, Float32, UInt8
from torch import Tensor, nn

from simforcing.errors import InputError, SimForcingError, check_shape
from simforcing.model.experts import ActionExpert, KeysValues, frame_rope, index_rope
from simforcing.model.mixture import Condition, action_block, watch
from simforcing.model.preparation import Preparation
from simforcing.model.world_model import WorldModel, WorldModelConfig
from simforcing.policy.preparation import PolicyPreparation

if TYPE_CHECKING:
    from simforcing.policy.agent import Agent

Variant = Literal["first-frame", "joint", "idm"]


@dataclass(frozen=True)
class PolicyConfig(WorldModelConfig):
    """Sizes of a world model, and what actions see. Actions are `horizon` steps over `frames` latent frames."""

    sim_condition: bool = False
    variant: Variant = "first-frame"
    horizon: int = 32
    frames: int = 3

    def __post_init__(self) -> None:
        if self.variant not in get_args(Variant):
            raise InputError(f"variant = {self.variant!r}: there are {', '.join(get_args(Variant))}")
        if self.sim_condition:
            raise InputError("sim_condition = true: a policy has no simulation to look at; leave it out")
        if self.attention != "first_frame_causal":
            raise InputError(
                f"attention = {self.attention}: a policy is given the first frame alone, which must not depend on "
                "later ones; only first_frame_causal fits"
            )
        if self.frames < 2 or self.horizon < 1 or self.horizon % (self.frames - 1):
            raise InputError(
                f"horizon = {self.horizon}, frames = {self.frames}: there must be at least two latent frames, and a "
                "whole number of action steps from one to the next"
            )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`; an unknown key, or a world model's configuration, is an error."""
        if "variant" not in data:
            raise SimForcingError("this is a world model, not a policy; start a policy from it ('initialised')")
        return super().from_dict(data)


@dataclass(frozen=True)
class ActionCondition:
    """What a denoising step of actions needs besides video, and no step changes."""

    rope: Complex64[Tensor, "A half_d"]
    text: list[KeysValues]
    text_mask: Bool[Tensor, "B 1 1 L"] | None


class Policy(WorldModel):
    """A world model whose action expert denoises actions.

    Of what it inherits, `velocity`, `condition` and `denoise` without actions are its video expert.
    """

    config_type: ClassVar[type[WorldModelConfig]] = PolicyConfig
    preparation_type: ClassVar[type[Preparation]] = PolicyPreparation
    config: PolicyConfig

    def __init__(self, config: PolicyConfig, preparation: Preparation | None = None) -> None:
        super().__init__(config, preparation)
        self._agent: Agent | None = None

    def act(
        self,
        images: Mapping[str, UInt8[np.ndarray, "B H W 3"]],
        state: Float[np.ndarray, "B p"],
        instruction: Sequence[str],
        seed: int | Sequence[int] = 0,
        steps: int = 10,
    ) -> Float32[np.ndarray, "B A a"]:
        """The next `horizon` actions, batched: pixels, stored numbers and words in, stored units out, nothing clipped.

        images: RGB by camera, exactly those of `preparation.cameras`, as in the recordings (also turned as they are);
            any size of the recordings' shape.
        state: in the units and order of the recordings, finite.
        seed: of the noise that denoising starts from: the same for every sample, or one each. No sample depends on
            its batch.
        steps: denoising steps.

        Raises:
            InputError: an argument does not fit; one line that names it, what it is and what it must be.
            SimForcingError: the policy does not say what it looks at, or its codec is not to be had.
        """
        if self._agent is None:
            from simforcing.policy.agent import Agent  # uses this class: this method is its front door

            self._agent = Agent(self)
        return self._agent.act(images, state, instruction, seed, steps)

    def action_condition(self, context: Float[Tensor, "B L X"], video: Condition) -> ActionCondition:
        """For `denoise_actions`; `video`: the condition of the video, under the same context."""
        config, device, head = self.config, self.device, self.config.action.head_dim
        if config.action_positions == "frame":
            rope = frame_rope(config.horizon, config.frames // config.patch[0], head, device)
        else:
            rope = index_rope(config.horizon, head, device)
        return ActionCondition(rope, self.action.text_keys_values(context.to(device, self.dtype)), video.text_mask)

    def watch(
        self,
        later: Float[Tensor, "B C F H W"],
        timestep: Float32[Tensor, " B"],
        known: Condition,
        predict: bool = True,
    ) -> tuple[Float32[Tensor, "B C F H W"] | None, list[KeysValues]]:
        """Velocity of the frames after the first, and the keys and values of all frames, the first one's before.

        known: of `remember_first`. predict: False leaves out the velocity.
        """
        velocity, seen = watch(self.video, later, timestep[:, None], known, predict)
        return None if velocity is None else velocity.float(), seen

    def denoise_actions(
        self,
        action: Float[Tensor, "B A a"],
        timestep: Float32[Tensor, " B"],
        condition: ActionCondition,
        video: list[KeysValues],
    ) -> Float32[Tensor, "B A a"]:
        """Velocity of noisy actions. `video`: keys and values of every block that they see; timestep [B], or [1]."""
        return denoise_actions(self.action, action, timestep, condition, video).float()

    def predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not of a policy: its video expert knows no actions."""
        raise SimForcingError("a policy predicts actions, not the video that follows from them; use a world model")

    def unused_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """None: with both losses everything is trained. What one setting leaves out, `settings.prepare` freezes."""
        return iter(())


def denoise_actions(
    expert: ActionExpert,
    action: Float[Tensor, "B A a"],
    timestep: Float32[Tensor, " B"],
    condition: ActionCondition,
    video: list[KeysValues],
) -> Float[Tensor, "B A a"]:
    """One pass of the action expert over noisy actions, which see each other and what they are given of the video."""
    x = expert.action_encoder(action.to(expert.action_encoder.weight.dtype))
    _, time = expert.condition_embedder.time(timestep[:, None])
    for i, block in enumerate(expert.layers):
        x, _ = block.run(action_block, x, time, condition.text[i], condition.text_mask, condition.rope, video[i], False)
    velocity: Tensor = expert.head(x)
    return velocity


def check_finite(name: str, value: Tensor) -> None:
    """Raises InputError where a value is NaN or infinite. Waits for the device."""
    if not bool(torch.isfinite(value).all()):
        raise InputError(f"{name} of shape {list(value.shape)} holds NaN or infinite values, it must be finite")


def check_actions(config: PolicyConfig, name: str, value: Tensor, batch: int) -> None:
    """Raises InputError where actions, or noise for them, are not what the policy was made for."""
    check_shape(name, value, [batch, config.horizon, config.action_dim])
    check_finite(name, value)
