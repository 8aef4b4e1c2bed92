"""Encoded clips in memory, and deterministic batches of them.

Legend: N clips, B batch, C channels, F latent frames, H W latent grid, A actions, L context tokens, X text width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.model.preparation import Preparation
from simforcing.model.text import Domain
from simforcing.train.objective import Batch

Text = tuple[Float[Tensor, "P L X"], Bool[Tensor, "P L"]]


@dataclass(frozen=True)
class LatentClips:
    """Windows of episodes as latents, with normalised actions and proprioception and a table of embedded prompts.

    `real` or `sim` may be missing; where both are there, a clip is a pair.
    """

    action: Float[Tensor, "N A a"]
    proprio: Float[Tensor, "N p"]
    task: Int64[Tensor, " N"]
    text: Mapping[Domain, Text]  # one row a task
    episode: Int64[Tensor, " N"]
    start: Int64[Tensor, " N"]
    real: Float[Tensor, "N C F H W"] | None = None
    sim: Float[Tensor, "N C F H W"] | None = None

    def __len__(self) -> int:
        return len(self.action)

    def select(self, rows: Tensor) -> "LatentClips":
        """The clips of these rows."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows]

        return replace(
            self,
            action=self.action[rows],
            proprio=self.proprio[rows],
            task=self.task[rows],
            episode=self.episode[rows],
            start=self.start[rows],
            real=cut(self.real),
            sim=cut(self.sim),
        )

    def only(self, episodes: list[int]) -> "LatentClips":
        """The clips of these episodes.

        Raises:
            SimForcingError: there are none.
        """
        rows = torch.isin(self.episode, torch.tensor(episodes)).nonzero().flatten()
        if not len(rows):
            raise SimForcingError(
                f"no clips of episodes {episodes[:5]}: the split and the encoded clips do not belong together"
            )
        return self.select(rows)

    def rows(self, size: int, seed: int, step: int) -> list[int]:
        """Which clips batch number `step` holds: one shuffled pass over all clips after another."""
        n = len(self)
        places = range(step * size, (step + 1) * size)
        orders = {e: np.random.default_rng([seed, e]).permutation(n) for e in {p // n for p in places}}
        return [int(orders[p // n][p % n]) for p in places]

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """Batch number `step` of a run with this seed."""
        return self.take(torch.tensor(self.rows(size, seed, step)))

    def take(self, rows: Tensor) -> Batch:
        """A batch of these rows; real latents are what is learnt where there are any."""

        def text(domain: Domain) -> tuple[Tensor, Tensor]:
            table, mask = self.text[domain]
            return table[self.task[rows]], mask[self.task[rows]]

        action, proprio = self.action[rows], self.proprio[rows]
        if self.real is None:
            if self.sim is None:
                raise SimForcingError("these clips hold neither real nor simulated latents")
            return Batch(self.sim[rows].float(), action, proprio, *text("sim"))
        batch = Batch(self.real[rows].float(), action, proprio, *text("real"))
        return (
            batch
            if self.sim is None
            else batch._replace(
                sim_latents=self.sim[rows].float(), sim_text=text("sim")[0], sim_text_mask=text("sim")[1]
            )
        )

    def one_domain(self, domain: Literal["real", "sim"]) -> "LatentClips":
        """The same clips with this domain's latents only."""
        return replace(self, sim=None) if domain == "real" else replace(self, real=None)

    def names(self, size: int, seed: int, step: int) -> list[str]:
        """Which episodes and starts a batch held, for messages."""
        return [f"episode {int(self.episode[r])} start {int(self.start[r])}" for r in self.rows(size, seed, step)]


def from_cache(arrays: Mapping[str, np.ndarray], tasks: list[str], preparation: Preparation) -> LatentClips:
    """Encoded clips as `train.encode` stored them, prepared for a model."""
    action, proprio = preparation.normalise(arrays["action"], arrays["proprio"])
    task, episode, start = (torch.from_numpy(arrays[k].astype(np.int64)) for k in ("task", "episode", "start"))
    real, sim = (torch.from_numpy(arrays[k]) if k in arrays else None for k in ("real", "sim"))
    domains: tuple[Domain, ...] = ("real", "sim")
    text = {d: preparation.context(tasks, d) for d in domains}
    return LatentClips(action, proprio, task, text, episode, start, real, sim)
