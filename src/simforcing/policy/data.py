"""Encoded samples of a policy, prepared for its network.

Legend: N samples, B batch, C channels, F latent frames, H W latent grid, A action steps, a action numbers,
p proprioception.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from simforcing.data.cache import open_cache
from simforcing.data.episode import ActionConvention
from simforcing.data.stats import Normalizer
from simforcing.data.windows import ClipRule
from simforcing.errors import SimForcingError
from simforcing.model.codec import Codec
from simforcing.policy.objective import Batch
from simforcing.policy.policy import PolicyConfig, Variant
from simforcing.policy.preparation import DOMAIN, PolicyPreparation
from simforcing.policy.recipe import PolicyRecipe
from simforcing.policy.windows import LATENTS
from simforcing.train.batches import Clips, Latents, latents_in, text_of
from simforcing.train.roles import held, ranges
from simforcing.train.words import LazyText, Text, reading, table


@dataclass(frozen=True)
class PolicyClips(Clips[Batch]):
    """Windows of episodes as latents, with normalised actions and proprioception, and which of them are padded.

    first_alone: batches hold the first latent frame only, for policies that look at no other.
    """

    by_clip = ("action", "action_padded", "proprio", "task", "episode", "start", "latents", "padded")
    action: Float[Tensor, "N A a"]
    action_padded: Bool[Tensor, "N A"]
    proprio: Float[Tensor, "N p"]
    task: Int64[Tensor, " N"]
    text: Text | LazyText  # by task
    episode: Int64[Tensor, " N"]
    start: Int64[Tensor, " N"]
    latents: Latents
    padded: Bool[Tensor, "N F"]
    first_alone: bool = False

    def take(self, rows: Int64[Tensor, " B"]) -> Batch:
        """A batch of these rows."""
        frames = 1 if self.first_alone else None
        return Batch(
            self.latents[rows][:, :, :frames].float(),
            self.action[rows],
            self.proprio[rows],
            *text_of(self.text, self.task[rows]),
            self.padded[rows, :frames],
            self.action_padded[rows],
        )


class PolicyData:
    """A cache of `PolicyWindows` with its split; up to a size it is read at once, else latents stay on disk.

    Raises:
        SimForcingError: the cache was made from something else than `expected` (names what differs), or is damaged.
    """

    def __init__(self, cache: Path, expected: Mapping[str, Any], split: Mapping[str, list[int]]) -> None:
        self.stored = open_cache(cache, expected)
        self.header, self.arrays, self.split = self.stored.header, held(self.stored), split

    def preparation(self, found: PolicyRecipe) -> PolicyPreparation:
        """With statistics of all rows of the training episodes."""
        action, state = ranges(self.arrays, self.split["train"])
        sizes = self.header["cameras"]
        return PolicyPreparation(
            action_stats=Normalizer.fit(action),
            state_stats=Normalizer.fit(state),
            rule=ClipRule(**self.header["rule"]),
            action=ActionConvention.from_dict(self.header["action"]),
            codec=found.codec,
            codec_identity=self.header["codec"],
            text=found.text,
            text_length=found.text_length,
            text_pooling=found.text_pooling,
            text_padding=found.text_padding,
            cameras={name: sizes[name] for name in self.header["left_to_right"]},
        )

    def clips(self, preparation: PolicyPreparation, part: str) -> PolicyClips:
        """The windows of one part of the split, prepared for a policy."""
        arrays = self.arrays
        action, proprio = preparation.normalise(arrays["action"], arrays["proprio"])
        task, episode, start = (torch.from_numpy(arrays[k].astype(np.int64)) for k in ("task", "episode", "start"))
        padded, action_padded = (torch.from_numpy(arrays[k]) for k in ("padded", "action_padded"))
        prepared = reading(preparation, self.stored, (DOMAIN,))
        text = table(prepared, self.header["tasks"], DOMAIN, stored=prepared is not preparation)
        latents = latents_in(arrays, LATENTS)
        every = PolicyClips(action, action_padded, proprio, task, text, episode, start, latents, padded)
        return every.only(self.split[part])

    def parts(self, preparation: PolicyPreparation, first_alone: bool) -> tuple[PolicyClips, PolicyClips]:
        """What is trained on, and what is held out.

        Raises:
            SimForcingError: a part has no windows.
        """
        train, val = (self.clips(preparation, part) for part in ("train", "val"))
        return replace(train, first_alone=first_alone), val


def config_of(found: PolicyRecipe, preparation: PolicyPreparation, channels: int, variant: Variant) -> PolicyConfig:
    """Sizes of a policy that a recipe, its data and its codec lead to."""
    rule = preparation.rule
    return PolicyConfig(
        video=found.video,
        action=found.action,
        channels=channels,
        action_dim=len(preparation.action_stats.min),
        proprio_dim=len(preparation.state_stats.min),
        action_positions=found.action_positions,
        variant=variant,
        horizon=rule.actions,
        frames=1 + (rule.frames - 1) // Codec.temporal_stride,
    )


def checked_split(split: Mapping[str, Sequence[int]], where: Path) -> None:
    """Raises SimForcingError for a split without episodes to train on or to hold out."""
    for part in ("train", "val"):
        if not split.get(part):
            raise SimForcingError(f"{where} has no episodes in part '{part}'; train and val are needed")
