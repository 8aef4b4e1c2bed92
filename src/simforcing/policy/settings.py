"""The three settings in which a policy is trained, and its loss as the training loop takes it.

| setting | variants | video expert | losses |
|---|---|---|---|
| `action-only` | any | frozen | action |
| `unconditional` | `first-frame` | trained | video and action |
| `video-action` | `joint`, `idm` | trained | video and action |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.policy.objective import Batch, Draws, PolicyObjective, check_batch, draw, policy_loss
from simforcing.policy.policy import Policy, Variant

SettingName = Literal["action-only", "unconditional", "video-action"]


@dataclass(frozen=True)
class Setting:
    """What is trained, and on what; the first of `variants` is its default."""

    variants: tuple[Variant, ...]
    train_video: bool
    objective: PolicyObjective


SETTINGS: dict[SettingName, Setting] = {
    "action-only": Setting(("first-frame", "joint", "idm"), False, PolicyObjective(video_weight=0.0)),
    "unconditional": Setting(("first-frame",), True, PolicyObjective()),
    "video-action": Setting(("joint", "idm"), True, PolicyObjective()),
}


def check_variant(name: SettingName, variant: Variant) -> Setting:
    """The setting, which must be one of this variant.

    Raises:
        SimForcingError: it is not, or there is none of this name.
    """
    if name not in SETTINGS:
        raise SimForcingError(f"setting {name!r}: there are {', '.join(SETTINGS)}")
    setting = SETTINGS[name]
    if variant not in setting.variants:
        raise SimForcingError(
            f"setting {name} trains policies of variant {' or '.join(setting.variants)}, this is one of {variant}"
        )
    return setting


def prepare(policy: Policy, name: SettingName, objective: PolicyObjective | None = None) -> PolicyObjective:
    """Sets what is trained in this setting, and gives its objective, or the one given.

    Raises:
        SimForcingError: the setting is not one of this variant.
    """
    setting = check_variant(name, policy.config.variant)
    chosen = setting.objective if objective is None else objective
    train(policy, setting.train_video, chosen)
    return chosen


def train(policy: Policy, video: bool, objective: PolicyObjective) -> None:
    """Sets which parameters are trained: all, less the video expert, less those that the objective does not reach."""
    policy.requires_grad_(True)
    if not video or not objective.video_gradient:
        policy.video.requires_grad_(False)
    elif objective.video_weight == 0:
        for name, parameter in policy.video.named_parameters():
            parameter.requires_grad_(_seen_by_actions(policy, name))


def _seen_by_actions(policy: Policy, name: str) -> bool:
    """Whether a parameter of the video expert has a part in keys and values: all but the head and what leads to it."""
    tail = name.removeprefix(f"blocks.{policy.config.video.num_layers - 1}.")
    if tail != name:
        return tail.startswith(("attn1.to_k", "attn1.to_v", "attn1.norm_k", "scale_shift_table"))
    return not name.startswith(("proj_out", "scale_shift_table"))


@dataclass(frozen=True)
class PolicyLoss:
    """A policy's objective as the training loop takes it."""

    config: PolicyObjective = PolicyObjective()

    @property
    def teacher(self) -> None:
        """There is none."""
        return None

    def draw(self, model: Policy, batch: Batch, generators: Sequence[torch.Generator]) -> Draws:
        """All randomness, drawn sample by sample, so that it does not depend on which samples share a batch.

        Raises:
            InputError: the batch does not fit the policy, or holds NaN.
        """
        check_batch(model.config, batch, self.config)
        rows = (batch._replace(latents=x, action=a) for x, a in zip(batch[0].split(1), batch[1].split(1), strict=True))
        drawn = [draw(model, row, self.config, g) for row, g in zip(rows, generators, strict=True)]
        parts = {name: [getattr(one, name) for one in drawn] for name in Draws._fields}
        return Draws(**{name: torch.cat(found) for name, found in parts.items() if found[0] is not None})

    def __call__(self, model: Policy, batch: Batch, draws: Draws) -> dict[str, Tensor]:
        """The named terms; `total` is minimised."""
        return policy_loss(model, batch, draws, self.config)
