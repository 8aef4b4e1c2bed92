"""Latents of a dataset's windows, once, to a cache.

Legend: n clips of a shard, T frames, C F h w latents, A actions, E episodes, D action or state width.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32

from simforcing.data.cache import read_header, source_hash, write_cache
from simforcing.data.episode import REAL, SIM, Dataset
from simforcing.data.windows import Clip, ClipRule, iter_clips, starts
from simforcing.errors import SimForcingError
from simforcing.model.codec import Codec, to_unit

CAMERAS = {"real": REAL, "sim": SIM}
SHARD = 32


def describe(dataset: Dataset, codec: Codec, rule: ClipRule, every: int) -> dict[str, Any]:
    """The header of a cache: whatever would make its latents others."""
    codec.latent_shape(rule.frames, rule.height, rule.width)
    domains = [d for d, key in CAMERAS.items() if key in dataset.cameras]
    if not domains:
        known = ", ".join(dataset.cameras)
        raise SimForcingError(
            f"{dataset.root} has neither {REAL} nor {SIM} (cameras: {known}); make pairs with 'simforcing twin pair'"
        )
    return {
        "codec": codec.identity,
        "rule": asdict(rule),
        "every": every,
        "domains": domains,
        "source": source_hash(dataset.root),
        "action": dataset.action_convention.to_dict(),
    }


def encode_dataset(
    dataset: Dataset,
    out: Path,
    codec: Codec,
    rule: ClipRule,
    every: int = 1,
    report: Callable[[int, int], None] = lambda i, n: None,
) -> dict[str, Any]:
    """Encodes every window (`every` rows apart) of every episode; returns the header.

    A complete cache of the same source and settings is kept as it is.

    Raises:
        SimForcingError: `out` holds something else, or no episode is long enough.
    """
    header = describe(dataset, codec, rule, every)
    if out.exists():
        found = read_header(out)
        differs = [k for k, v in header.items() if found.get(k) != v]
        if differs:
            raise SimForcingError(f"{out} was encoded with another {', '.join(differs)}; choose another directory")
        return found
    total = sum(len(starts(n, rule, every)) for n in dataset.lengths)
    if total == 0:
        raise SimForcingError(
            f"{dataset.root}: no episode has the {rule.steps} rows of a window; use a shorter clip rule"
        )
    tasks: list[str] = sorted({dataset[i].task for i in range(len(dataset))})
    full = header | {"tasks": tasks, "clips": total}
    rows = extremes(dataset)
    clips = iter_clips(dataset, rule, [CAMERAS[d] for d in header["domains"]], every)
    stored = (_shard(batch, codec, header["domains"], tasks, rows) for batch in _batches(clips, total, report))
    write_cache(out, full, stored)
    return full


def extremes(dataset: Dataset) -> dict[str, Float32[np.ndarray, "E D"]]:
    """Least and greatest action and state of each of E episodes, over all its rows: what statistics are made of."""
    found: dict[str, list[np.ndarray]] = {}
    for i in range(len(dataset)):
        episode = dataset[i]
        for name, rows in (("action", episode.action), ("state", episode.state)):
            found.setdefault(f"{name}_min", []).append(rows.min(axis=0))
            found.setdefault(f"{name}_max", []).append(rows.max(axis=0))
    return {name: np.stack(values).astype(np.float32) for name, values in found.items()}


def _batches(clips: Iterable[Clip], total: int, report: Callable[[int, int], None]) -> Iterator[list[Clip]]:
    stream, done = iter(clips), 0
    while batch := list(islice(stream, SHARD)):
        yield batch
        done += len(batch)
        report(done, total)


def _shard(
    batch: list[Clip], codec: Codec, domains: list[str], tasks: list[str], rows: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Arrays with one row a clip; `rows` are the extremes of the episodes, of which each clip carries its own's."""
    episode = np.array([c.episode for c in batch], np.int32)
    shard: dict[str, np.ndarray] = {
        "action": np.stack([c.action for c in batch]),
        "proprio": np.stack([c.proprio for c in batch]),
        "episode": episode,
        "start": np.array([c.start for c in batch], np.int32),
        "task": np.array([tasks.index(c.task) for c in batch], np.int32),
    }
    for domain in domains:
        frames = torch.from_numpy(np.stack([c.frames[CAMERAS[domain]] for c in batch]))
        with torch.inference_mode():
            shard[domain] = codec.encode(to_unit(frames)).half().numpy()
    return shard | {name: values[episode] for name, values in rows.items()}
