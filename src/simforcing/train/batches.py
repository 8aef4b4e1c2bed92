"""Encoded clips, in memory or left on disk until a batch asks for them, and deterministic batches of them.

A window is drawn by (seed, epoch, index): `LatentClips.order` is a permutation of all clips for each epoch, and sample
number `index` of an epoch is its entry, whatever the batch size and the number of processes.

Legend: N clips, B batch, C channels, F latent frames, H W latent grid, A actions, L context tokens, X text width.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from simforcing.data.cache import Cache, Rows
from simforcing.errors import SimForcingError
from simforcing.model.preparation import Preparation
from simforcing.model.text import Domain
from simforcing.train.objective import Batch
from simforcing.train.words import LazyText, Text, reading, table

AHEAD = 2
"""Batches that are read before they are asked for."""


class StoredLatents:
    """Latents [N, C, F, H, W] of a cache that stay on disk; `x[rows]` reads and checks some of them."""

    def __init__(self, rows: Rows, chosen: Int64[np.ndarray, " N"] | None = None) -> None:
        self._rows = rows
        self._chosen = np.arange(len(rows)) if chosen is None else chosen

    @property
    def shape(self) -> torch.Size:
        """N, C, F, H, W."""
        return torch.Size((len(self._chosen), *self._rows.shape[1:]))

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, rows: Int64[Tensor, " B"]) -> Float[Tensor, "B C F H W"]:
        """Raises SimForcingError, naming the shard, for rows that are not as they were written."""
        return torch.from_numpy(self._rows.take(self._chosen[rows.numpy()]))

    def select(self, rows: Int64[Tensor, " B"]) -> "StoredLatents":
        """These rows, still on disk."""
        return StoredLatents(self._rows, self._chosen[rows.numpy()])


Latents = Float[Tensor, "N C F H W"] | StoredLatents


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, clips: int) -> Int64[np.ndarray, " N"]:
    return np.random.default_rng([seed, epoch]).permutation(clips)


@dataclass(frozen=True)
class LatentClips:
    """Windows of episodes as latents, with normalised actions and proprioception and the context of each instruction.

    `real` or `sim` may be missing; where both are there, a clip is a pair.
    """

    action: Float[Tensor, "N A a"]
    proprio: Float[Tensor, "N p"]
    task: Int64[Tensor, " N"]
    text: Mapping[Domain, Text | LazyText]  # by task; the same object where both domains have the same prompt
    episode: Int64[Tensor, " N"]
    start: Int64[Tensor, " N"]
    real: Latents | None = None
    sim: Latents | None = None

    def __len__(self) -> int:
        return len(self.action)

    def select(self, rows: Tensor) -> "LatentClips":
        """The clips of these rows."""

        def cut(x: Latents | None) -> Latents | None:
            return x.select(rows) if isinstance(x, StoredLatents) else None if x is None else x[rows]

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

    def sample(self, seed: int, epoch: int, index: int) -> int:
        """The clip that is number `index` of an epoch: one shuffled pass over all clips, another for each epoch."""
        return int(_order(seed, epoch, len(self))[index])

    def rows(self, size: int, seed: int, step: int, rank: int = 0, world: int = 1) -> list[int]:
        """Which clips process `rank` of `world` gets for batch number `step`, `size` of them.

        All processes together get what one alone would get with `size * world`, one pass after another.
        """
        n, total = len(self), size * world
        places = range(step * total, (step + 1) * total)[rank::world]
        return [self.sample(seed, place // n, place % n) for place in places]

    def batch(self, size: int, seed: int, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Batch number `step` of a run with this seed, or the part of it that is for process `rank` of `world`."""
        return self.take(torch.tensor(self.rows(size, seed, step, rank, world)))

    def batches(self, size: int, seed: int, first: int = 0, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Batches from number `first` on, without end, each read while the ones before it are used.

        What goes wrong while reading is raised when that batch is asked for. Close the iterator to end its thread.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
            waiting: deque[Future[Batch]] = deque()
            try:
                for step in count(first):
                    waiting.append(pool.submit(self.batch, size, seed, step, rank, world))
                    if len(waiting) > AHEAD:
                        yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def take(self, rows: Tensor) -> Batch:
        """A batch of these rows; real latents are what is learnt where there are any."""

        def text(domain: Domain) -> tuple[Tensor, Tensor]:
            found, task = self.text[domain], self.task[rows]
            return found.of(task) if isinstance(found, LazyText) else (found[0][task], found[1][task])

        action, proprio = self.action[rows], self.proprio[rows]
        if self.real is None:
            if self.sim is None:
                raise SimForcingError("these clips hold neither real nor simulated latents")
            return Batch(self.sim[rows].float(), action, proprio, *text("sim"))
        batch = Batch(self.real[rows].float(), action, proprio, *text("real"))
        if self.sim is None:
            return batch
        pairs = batch._replace(sim_latents=self.sim[rows].float())
        if self.text["sim"] is self.text["real"]:
            return pairs
        sim_text, sim_mask = text("sim")
        return pairs._replace(sim_text=sim_text, sim_text_mask=sim_mask)

    def one_domain(self, domain: Literal["real", "sim"]) -> "LatentClips":
        """The same clips with this domain's latents only."""
        return replace(self, sim=None) if domain == "real" else replace(self, real=None)

    def names(self, size: int, seed: int, step: int, rank: int = 0, world: int = 1) -> list[str]:
        """Which episodes and starts a batch held, for messages."""
        rows = self.rows(size, seed, step, rank, world)
        return [f"episode {int(self.episode[r])} start {int(self.start[r])}" for r in rows]


def from_cache(arrays: Mapping[str, np.ndarray], tasks: list[str], preparation: Preparation) -> LatentClips:
    """Encoded clips as `train.encode` stored them, prepared for a model.

    Latents of a `Cache` stay on disk, those of arrays in memory are shared. Embeddings of the instructions come from
    the cache where it has them, else from the preparation's text encoder.
    """
    action, proprio = preparation.normalise(arrays["action"], arrays["proprio"])
    task, episode, start = (torch.from_numpy(arrays[k].astype(np.int64)) for k in ("task", "episode", "start"))
    real, sim = (_latents(arrays, k) if k in arrays else None for k in ("real", "sim"))
    prepared = reading(preparation, arrays)
    stored = prepared is not preparation
    real_text = table(prepared, tasks, "real", stored)
    same = preparation.prompts["real"] == preparation.prompts["sim"]
    text: dict[Domain, Text | LazyText] = {
        "real": real_text,
        "sim": real_text if same else table(prepared, tasks, "sim", stored),
    }
    return LatentClips(action, proprio, task, text, episode, start, real, sim)


def _latents(arrays: Mapping[str, np.ndarray], name: str) -> Latents:
    return StoredLatents(arrays.rows(name)) if isinstance(arrays, Cache) else torch.from_numpy(arrays[name])
