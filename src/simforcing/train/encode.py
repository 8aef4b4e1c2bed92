"""Latents of a dataset's windows and embeddings of its instructions, once, to a cache.

Every window is encoded on its own, also where windows overlap: the codecs are causal and encode the first frame alone,
so the latents of a window are no slice of those of a longer video. A shard holds the windows of some whole episodes, in
order, and depends on nothing but the dataset and the settings; it is the unit of work, of restarting and of sharing.

Legend: n clips of a shard, k clips at a time, T frames, C F h w latents, A actions, D action or state width,
P prompts, L context tokens, X text width.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8

from simforcing.data.cache import CacheWriter, source_hash
from simforcing.data.episode import REAL, SIM, Dataset, Episode
from simforcing.data.formats import survey
from simforcing.data.problems import Problems
from simforcing.data.source import assemble
from simforcing.data.windows import ClipRule, resize_crop, starts
from simforcing.errors import SimForcingError
from simforcing.model.codec import Codec, load_codec, to_unit
from simforcing.train.words import Words
from simforcing.twin.parallel import Workers

CAMERAS = {"real": REAL, "sim": SIM}
SHARD = 128
"""Clips from which on a shard is full; it holds whole episodes."""
GROUP = 256
"""Rows of an episode whose pictures are in memory at once, at least those of one window."""
PIXELS = 1 << 25
"""Bytes of pictures that the codec gets at once, at least one clip."""

Report = Callable[[str, int, int], None]
"""Called with a stage, how many are done, and of how many."""


@dataclass(frozen=True)
class Encoded:
    """What an encoding made.

    complete: the cache is there; else this was a share of it, in `root`, and `left` shards were missing. left_out:
    episodes (positions in the dataset) that are damaged, with reasons.
    """

    header: dict[str, Any]
    root: Path
    complete: bool = True
    left: int = 0
    left_out: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Job:
    """What is the same for all shards; it travels to the workers. codec: a source that `load_codec` knows."""

    root: Path
    skipped: tuple[tuple[int, str], ...]
    rule: ClipRule
    every: int
    domains: tuple[str, ...]
    tasks: tuple[str, ...]
    skip_bad: bool
    writer: CacheWriter
    parts: tuple[tuple[int, ...], ...]  # numbers of the episodes (without the skipped ones) of each shard
    codec: str = ""
    device: str = "cpu"
    threads: int | None = None


class Tools:
    """What encodes: a job with its dataset and codec open."""

    def __init__(self, job: Job, dataset: Dataset, codec: Codec) -> None:
        self.job, self.dataset = job, dataset
        self.codec = codec.to(job.device)
        self.positions = positions(dataset)

    def make(self, number: int) -> int:
        """Encode and store one shard; returns its number of clips."""
        job, parts, bad = self.job, [], {}
        for index in job.parts[number]:
            try:
                parts.append(self._episode(self.dataset[index], self.positions[index]))
            except SimForcingError as error:
                if not job.skip_bad:
                    raise
                bad[str(self.positions[index])] = str(error)
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}
        job.writer.save(_name(number), arrays, {"bad": bad})
        return len(arrays["start"]) if arrays else 0

    def _episode(self, episode: Episode, position: int) -> dict[str, np.ndarray]:
        """One row a window; each carries the extremes of its episode's rows, which statistics are made of."""
        rule, task = self.job.rule, self.job.tasks.index(episode.task)
        first = starts(episode.length, rule, self.job.every)
        n = len(first)
        arrays: dict[str, np.ndarray] = {
            "action": np.stack([episode.action[s : s + rule.actions] for s in first]),
            "proprio": episode.state[first],
            "episode": np.full(n, position, np.int32),
            "start": np.array(first, np.int32),
            "task": np.full(n, task, np.int32),
        }
        for domain in self.job.domains:
            pictures = windows(episode, CAMERAS[domain], first, rule)
            latents = [self._latents(frames, episode) for frames in pictures]
            arrays[domain] = np.concatenate(latents)
        for name, rows in (("action", episode.action), ("state", episode.state)):
            for kind, extreme in (("min", rows.min(axis=0)), ("max", rows.max(axis=0))):
                arrays[f"{name}_{kind}"] = np.repeat(extreme[None].astype(np.float32), n, axis=0)
        return arrays

    @torch.inference_mode()
    def _latents(self, frames: UInt8[np.ndarray, "k T H W 3"], episode: Episode) -> np.ndarray:
        video = to_unit(torch.from_numpy(frames).to(self.job.device))
        latents: np.ndarray = self.codec.encode(video).half().cpu().numpy()
        if not np.isfinite(latents).all():
            raise SimForcingError(f"{episode.where}: its latents do not fit float16; use a codec that normalises them")
        return latents


def positions(dataset: Dataset) -> list[int]:
    """Where each episode stands in the dataset as it lies on disk, those counted that were skipped when opening."""
    skipped = {index for index, _ in dataset.skipped}
    return [i for i in range(len(dataset) + len(skipped)) if i not in skipped]


def windows(
    episode: Episode, camera: str, first: Sequence[int], rule: ClipRule
) -> Iterator[UInt8[np.ndarray, "k T H W 3"]]:
    """Pictures of the windows that begin at these ascending rows, k at a time; equal to those of `load_clip`.

    A frame that several windows share is decoded once, save where more rows than `GROUP` lie between them.
    """
    size = max(1, PIXELS // (rule.frames * rule.height * rule.width * 3))
    at = 0
    while at < len(first):
        group = [s for s in first[at:] if s + rule.steps <= first[at] + max(GROUP, rule.steps)]
        rows = sorted({s + i * rule.stride for s in group for i in range(rule.frames)})
        place = {row: i for i, row in enumerate(rows)}
        pictures = resize_crop(episode.frames(camera, rows), rule.height, rule.width)
        picks = [[place[s + i * rule.stride] for i in range(rule.frames)] for s in group]
        for i in range(0, len(picks), size):
            yield pictures[np.array(picks[i : i + size])]
        at += len(group)


def describe(dataset: Dataset, codec: Codec, rule: ClipRule, every: int) -> dict[str, Any]:
    """The header of a cache of latents: whatever would make them others.

    Raises:
        SimForcingError: the dataset has neither view, or its windows do not fit the codec.
    """
    codec.latent_shape(rule.frames, rule.height, rule.width)
    domains = [d for d, key in CAMERAS.items() if key in dataset.cameras]
    if not domains:
        known = ", ".join(dataset.cameras)
        raise SimForcingError(
            f"{dataset.root} has neither {REAL} nor {SIM} (cameras: {known}); make pairs with 'simforcing twin pair'"
        )
    return {
        "codec": codec.identity,
        "normalisation": {"pixels": [-1, 1], "latents": "codec", "actions": "as stored", "stored": "float16"},
        "rule": asdict(rule),
        "resolution": [rule.height, rule.width],
        "every": every,
        "shard": SHARD,
        "domains": domains,
        "source": source_hash(dataset.root),
        "skipped": [index for index, _ in dataset.skipped],
        "action": dataset.action_convention.to_dict(),
    }


def encode_dataset(
    dataset: Dataset,
    out: Path,
    codec: Codec,
    rule: ClipRule,
    every: int = 1,
    *,
    words: Words | None = None,
    skip_bad: bool = False,
    workers: int = 1,
    codec_source: str = "",
    shard: tuple[int, int] | None = None,
    device: str = "cpu",
    report: Report = lambda stage, done, total: None,
) -> Encoded:
    """Encodes every window (`every` rows apart) of every episode, and all prompts where there are `words`.

    Goes on where a run with the same settings stopped; shards that are there are checked and kept, also of a complete
    cache. skip_bad: leave out episodes that cannot be read, also those found out only when they are decoded. workers:
    processes, each with the codec that `load_codec(codec_source)` gives. shard: (i, n) makes only the i-th of n shares
    of the shards, on a disk that all share; the same call without it makes what is missing and completes the cache.

    Raises:
        SimForcingError: `out` holds something else (names what differs with both values), no episode is long enough,
            an episode is damaged, or something cannot be written. What is finished stays.
    """
    if workers > 1 and not codec_source:
        raise SimForcingError("several workers need the source of the codec, as load_codec takes it")
    if out.exists() and not out.is_dir():
        raise SimForcingError(f"{out}: is a file; choose another directory")
    kept, tasks, bad = _survey(dataset, rule, skip_bad)
    header = describe(dataset, codec, rule, every)
    header["text"] = None if words is None else words.identity(tasks)
    parts = cut(dataset.lengths, kept, rule, every)
    texts = {} if words is None else {f"text-{i:05d}.safetensors": p for i, p in enumerate(words.parts(tasks))}
    writer = CacheWriter(out, header, [*texts, *(_name(i) for i in range(len(parts)))])
    todo, left = _todo(writer, shard, report)
    threads = None if workers == 1 else max(1, (os.cpu_count() or 1) // workers)
    job = Job(dataset.root, dataset.skipped, rule, every, tuple(header["domains"]), tuple(tasks), skip_bad, writer,
              parts, codec_source, device, threads)  # fmt: skip
    for number, (name, prompts) in enumerate(texts.items()):
        if name in todo and words is not None:
            writer.save(name, words.embed(prompts), {"bad": {}})
            report("text", number + 1, len(texts))
    numbers = [i for i in range(len(parts)) if _name(i) in todo]
    _encode(job, Tools(job, dataset, codec), numbers, workers, report)
    if shard is not None:
        return Encoded(header, writer.root, False, left)
    for notes in writer.notes():
        bad |= {int(position): reason for position, reason in notes["bad"].items()}
    bad = dict(sorted({**dict(dataset.skipped), **bad}.items()))
    contents: dict[str, Any] = {"tasks": tasks, "left_out": {str(k): reason for k, reason in bad.items()}}
    if words is not None:
        contents["text_source"] = words.source
    return Encoded(writer.finish(contents), out, left_out=tuple(bad.items()))


def _encode(job: Job, tools: Tools, todo: Sequence[int], workers: int, report: Report) -> None:
    total = sum(len(starts(tools.dataset.lengths[e], job.rule, job.every)) for i in todo for e in job.parts[i])
    done = 0
    with Workers(workers) as team:
        work: Callable[[int], int] = tools.make if team.here else partial(make_in_worker, job)
        for _, clips in team.each(work, todo):
            done += clips
            report("encoding", done, max(total, done))


def _survey(dataset: Dataset, rule: ClipRule, skip_bad: bool) -> tuple[list[int], list[str], dict[int, str]]:
    """Episodes that can be read and are long enough, all tasks, and what is wrong with the others by position."""
    kept, tasks, bad, where = [], set(), {}, positions(dataset)
    for index, length in enumerate(dataset.lengths):
        try:
            task = dataset[index].task
        except SimForcingError as error:
            if not skip_bad:
                raise
            bad[where[index]] = str(error)
            continue
        tasks.add(task)
        if length >= rule.steps:
            kept.append(index)
    if not kept:
        raise SimForcingError(
            f"{dataset.root}: no episode has the {rule.steps} rows of a window; use a shorter clip rule"
        )
    return kept, sorted(tasks), bad


def cut(lengths: Sequence[int], kept: Sequence[int], rule: ClipRule, every: int) -> tuple[tuple[int, ...], ...]:
    """Whole episodes in order, cut into shards of at least `SHARD` clips (the last may have fewer)."""
    parts: list[tuple[int, ...]] = []
    part: list[int] = []
    clips = 0
    for index in kept:
        part.append(index)
        clips += len(starts(lengths[index], rule, every))
        if clips >= SHARD:
            parts.append(tuple(part))
            part, clips = [], 0
    return (*parts, tuple(part)) if part else tuple(parts)


def _todo(writer: CacheWriter, shard: tuple[int, int] | None, report: Report) -> tuple[set[str], int]:
    """Names of the shards to make here, and how many others are missing."""
    if shard is not None and not 1 <= shard[0] <= shard[1]:
        raise SimForcingError(f"shard {shard[0]}/{shard[1]}: give i/n with i from 1 to n")
    share = writer.names if shard is None else writer.names[shard[0] - 1 :: shard[1]]
    missing = set()
    for number, name in enumerate(writer.names):
        there = (writer.root / name).exists()
        if there and name in share:
            report("checking", number + 1, len(writer.names))
            there = writer.sound(name)
        if not there:
            missing.add(name)
    return missing & set(share), len(missing - set(share))


def _name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


class _Worker:
    """In a worker process: the tools of its job, opened once."""

    def __init__(self) -> None:
        self.job: Job | None = None

    @cached_property
    def tools(self) -> Tools:
        job = self.job
        assert job is not None
        if job.threads:
            torch.set_num_threads(job.threads)
        dataset = assemble(survey(job.root, Problems(strict=not job.skipped)), dict(job.skipped))
        return Tools(job, dataset, load_codec(job.codec))


_worker = _Worker()


def make_in_worker(job: Job, number: int) -> int:
    """`Tools.make` in another process, which serves one job."""
    _worker.job = job
    return _worker.tools.make(number)
