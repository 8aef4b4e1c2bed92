"""Encoded clips, in memory or left on disk until a batch asks for them, and deterministic batches of them.

A window is drawn by (seed, epoch, index): `LatentClips.order` is a permutation of all clips for each epoch, and sample
number `index` of an epoch is its entry, whatever the batch size and the number of processes.

Legend: N clips, B batch, C channels, F latent frames, H W latent grid, A actions, L context tokens, X text width.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
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


B = TypeVar("B")


class Clips(ABC, Generic[B]):
    """Windows of episodes; a frozen dataclass whose fields `by_clip` have a row a window, whatever they hold."""

    by_clip: ClassVar[tuple[str, ...]]
    episode: Int64[Tensor, " N"]
    start: Int64[Tensor, " N"]

    @abstractmethod
    def take(self, rows: Int64[Tensor, " B"]) -> B:
        """A batch of these rows."""

    def __len__(self) -> int:
        return len(self.episode)

    def select(self, rows: Int64[Tensor, " B"]) -> Self:
        """The clips of these rows."""

        def cut(x: Any) -> Any:
            return x.select(rows) if isinstance(x, StoredLatents) else None if x is None else x[rows]

        changed: dict[str, Any] = {name: cut(getattr(self, name)) for name in self.by_clip}
        return replace(self, **changed)  # type: ignore[type-var]

    def only(self, episodes: list[int]) -> Self:
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

    def batch(self, size: int, seed: int, step: int, rank: int = 0, world: int = 1) -> B:
        """Batch number `step` of a run with this seed, or the part of it that is for process `rank` of `world`."""
        return self.take(torch.tensor(self.rows(size, seed, step, rank, world)))

    def batches(self, size: int, seed: int, first: int = 0, rank: int = 0, world: int = 1) -> Iterator[B]:
        """Batches from number `first` on, without end, each read while the ones before it are used.

        What goes wrong while reading is raised when that batch is asked for. Close the iterator to end its thread.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
            waiting: deque[Future[B]] = deque()
            try:
                for step in count(first):
                    waiting.append(pool.submit(self.batch, size, seed, step, rank, world))
                    if len(waiting) > AHEAD:
                        yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def names(self, size: int, seed: int, step: int, rank: int = 0, world: int = 1) -> list[str]:
        """Which episodes and starts a batch held, for messages."""
        rows = self.rows(size, seed, step, rank, world)
        return [f"episode {int(self.episode[r])} start {int(self.start[r])}" for r in rows]


@dataclass(frozen=True)
class LatentClips(Clips[Batch]):
    """Windows of episodes as latents, with normalised actions and proprioception and the context of each instruction.

    `real` or `sim` may be missing; where both are there, a clip is a pair.
    """

    by_clip = ("action", "proprio", "task", "episode", "start", "real", "sim")
    action: Float[Tensor, "N A a"]
    proprio: Float[Tensor, "N p"]
    task: Int64[Tensor, " N"]
    text: Mapping[Domain, Text | LazyText]  # by task; the same object where both domains have the same prompt
    episode: Int64[Tensor, " N"]
    start: Int64[Tensor, " N"]
    real: Latents | None = None
    sim: Latents | None = None

    def take(self, rows: Tensor) -> Batch:
        """A batch of these rows; real latents are what is learnt where there are any."""

        def text(domain: Domain) -> tuple[Tensor, Tensor]:
            return text_of(self.text[domain], self.task[rows])

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


def from_cache(arrays: Mapping[str, np.ndarray], tasks: list[str], preparation: Preparation) -> LatentClips:
    """Encoded clips as `train.encode` stored them, prepared for a model.

    Latents of a `Cache` stay on disk, those of arrays in memory are shared. Embeddings of the instructions come from
    the cache where it has them, else from the preparation's text encoder.
    """
    action, proprio = preparation.normalise(arrays["action"], arrays["proprio"])
    task, episode, start = (torch.from_numpy(arrays[k].astype(np.int64)) for k in ("task", "episode", "start"))
    real, sim = (latents_in(arrays, k) if k in arrays else None for k in ("real", "sim"))
    prepared = reading(preparation, arrays)
    stored = prepared is not preparation
    real_text = table(prepared, tasks, "real", stored)
    same = preparation.prompts["real"] == preparation.prompts["sim"]
    text: dict[Domain, Text | LazyText] = {
        "real": real_text,
        "sim": real_text if same else table(prepared, tasks, "sim", stored),
    }
    return LatentClips(action, proprio, task, text, episode, start, real, sim)


def latents_in(arrays: Mapping[str, np.ndarray], name: str) -> Latents:
    """Latents of a cache, left on disk, or of arrays in memory, shared."""
    return StoredLatents(arrays.rows(name)) if isinstance(arrays, Cache) else torch.from_numpy(arrays[name])


def text_of(found: Text | LazyText, task: Int64[Tensor, " B"]) -> tuple[Float[Tensor, "B L X"], Bool[Tensor, "B L"]]:
    """Context and mask of each sample's instruction."""
    return found.of(task) if isinstance(found, LazyText) else (found[0][task], found[1][task])
