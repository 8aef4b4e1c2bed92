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
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from simforcing.data.cache import CacheWriter, source_hash
from simforcing.data.episode import REAL, SIM, Dataset, Episode
from simforcing.data.formats import survey
from simforcing.data.problems import Problems
from simforcing.data.source import assemble
from simforcing.data.windows import ClipRule, resize_crop, split_episodes, starts
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


Latents = Callable[[Tensor], np.ndarray]
"""Stored latents [k, C, F, h, w] of pictures: uint8 [k, T, H, W, 3], or in [-1, 1] and [k, 3, T, H, W]."""
Pictures = TypeVar("Pictures", np.ndarray, Tensor)


class Content(Protocol):
    """Which windows an episode gives, and what is stored of each. It travels to the workers."""

    @property
    def rule(self) -> ClipRule:
        """How a window is cut."""

    def starts(self, length: int) -> Sequence[int]:
        """First rows of the windows of an episode of so many rows, ascending."""

    def header(self, dataset: Dataset, codec: Codec) -> dict[str, Any]:
        """Whatever would make the cache another one."""

    def arrays(self, episode: Episode, first: Sequence[int], latents: Latents) -> dict[str, np.ndarray]:
        """What is stored of the windows that begin at these rows, a row each."""


@dataclass(frozen=True)
class Pairs:
    """Content of a world model's cache: windows that fit in their episode, the real and the simulated view."""

    rule: ClipRule
    every: int = 1

    def starts(self, length: int) -> Sequence[int]:
        """See `Content`."""
        return starts(length, self.rule, self.every)

    def header(self, dataset: Dataset, codec: Codec) -> dict[str, Any]:
        """See `describe`."""
        return describe(dataset, codec, self.rule, self.every)

    def arrays(self, episode: Episode, first: Sequence[int], latents: Latents) -> dict[str, np.ndarray]:
        """Actions, state at the first row, latents of each view that there is."""
        found: dict[str, np.ndarray] = {
            "action": np.stack([episode.action[s : s + self.rule.actions] for s in first]),
            "proprio": episode.state[first],
        }
        for domain in domains_of(episode.cameras):
            pictures = windows(episode, CAMERAS[domain], first, self.rule)
            found[domain] = np.concatenate([latents(torch.from_numpy(frames)) for frames in pictures])
        return found


@dataclass(frozen=True)
class Job:
    """What is the same for all shards; it travels to the workers. codec: a source that `load_codec` knows."""

    root: Path
    skipped: tuple[tuple[int, str], ...]
    content: Content
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
        first = self.job.content.starts(episode.length)
        n = len(first)
        arrays = self.job.content.arrays(episode, first, partial(self._latents, episode)) | {
            "episode": np.full(n, position, np.int32),
            "start": np.array(first, np.int32),
            "task": np.full(n, self.job.tasks.index(episode.task), np.int32),
        }
        for name, rows in (("action", episode.action), ("state", episode.state)):
            for kind, extreme in (("min", rows.min(axis=0)), ("max", rows.max(axis=0))):
                arrays[f"{name}_{kind}"] = np.repeat(extreme[None].astype(np.float32), n, axis=0)
        return arrays

    @torch.inference_mode()
    def _latents(self, episode: Episode, pictures: Tensor) -> np.ndarray:
        video = pictures.to(self.job.device)
        video = to_unit(video) if video.dtype == torch.uint8 else video
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
    """Pictures of the windows that begin at these ascending rows, k at a time; equal to those of `load_clip`."""

    def read(rows: list[int]) -> UInt8[np.ndarray, "n H W 3"]:
        return resize_crop(episode.frames(camera, rows), rule.height, rule.width)

    return grouped([range(s, s + rule.steps, rule.stride) for s in first], read, together(rule))


def together(rule: ClipRule) -> int:
    """Windows that the codec gets at once."""
    return max(1, PIXELS // (rule.frames * rule.height * rule.width * 3))


def grouped(picks: Sequence[Sequence[int]], read: Callable[[list[int]], Pictures], size: int) -> Iterator[Pictures]:
    """Pictures of windows that begin at ascending rows, each given by its rows, `size` windows at a time.

    A frame that several windows share is read once, save where more rows than `GROUP` lie between them.
    """
    at = 0
    while at < len(picks):
        end = picks[at][0] + max(GROUP, picks[at][-1] - picks[at][0] + 1)
        group = [rows for rows in picks[at:] if rows[-1] < end]
        rows = sorted({row for window in group for row in window})
        place = {row: i for i, row in enumerate(rows)}
        pictures = read(rows)
        chosen = np.array([[place[row] for row in window] for window in group])
        for i in range(0, len(group), size):
            yield pictures[chosen[i : i + size]]
        at += len(group)


def domains_of(cameras: Sequence[str]) -> list[str]:
    """Which views there are, in the order in which they are stored."""
    return [domain for domain, key in CAMERAS.items() if key in cameras]


def describe(dataset: Dataset, codec: Codec, rule: ClipRule, every: int) -> dict[str, Any]:
    """The header of a cache of latents: whatever would make them others.

    Raises:
        SimForcingError: the dataset has neither view, or its windows do not fit the codec.
    """
    codec.latent_shape(rule.frames, rule.height, rule.width)
    domains = domains_of(dataset.cameras)
    if not domains:
        known = ", ".join(dataset.cameras)
        raise SimForcingError(
            f"{dataset.root} has neither {REAL} nor {SIM} (cameras: {known}); make pairs with 'simforcing twin pair'"
        )
    return {
        "codec": codec.identity,
        "normalisation": {"pixels": [-1, 1], "latents": "codec", "actions": "as stored", "stored": "float16"},
        "domains": domains,
        **described(dataset, rule, every),
    }


def described(dataset: Dataset, rule: ClipRule, every: int) -> dict[str, Any]:
    """The part of a header that says which windows of which dataset they are."""
    return {
        "rule": asdict(rule),
        "resolution": [rule.height, rule.width],
        "every": every,
        "shard": SHARD,
        "source": source_hash(dataset.root),
        "skipped": [index for index, _ in dataset.skipped],
        "action": dataset.action_convention.to_dict(),
    }


def encode_dataset(
    dataset: Dataset, out: Path, codec: Codec, rule: ClipRule, every: int = 1, **options: Any
) -> Encoded:
    """Every window (`every` rows apart) of both views, for world models; options of `encode_windows`."""
    return encode_windows(dataset, out, codec, Pairs(rule, every), **options)


def encode_windows(
    dataset: Dataset,
    out: Path,
    codec: Codec,
    content: Content,
    *,
    words: Words | None = None,
    skip_bad: bool = False,
    workers: int = 1,
    codec_source: str = "",
    shard: tuple[int, int] | None = None,
    device: str = "cpu",
    report: Report = lambda stage, done, total: None,
) -> Encoded:
    """Encodes every window of every episode, and all prompts where there are `words`.

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
    kept, tasks, bad = _survey(dataset, content, skip_bad)
    header = content.header(dataset, codec)
    header["text"] = None if words is None else words.identity(tasks)
    parts = cut(kept, [len(content.starts(dataset.lengths[index])) for index in kept])
    texts = {} if words is None else {f"text-{i:05d}.safetensors": p for i, p in enumerate(words.parts(tasks))}
    writer = CacheWriter(out, header, [*texts, *(_name(i) for i in range(len(parts)))])
    todo, left = _todo(writer, shard, report)
    threads = None if workers == 1 else max(1, (os.cpu_count() or 1) // workers)
    job = Job(dataset.root, dataset.skipped, content, tuple(tasks), skip_bad, writer, parts, codec_source, device,
              threads)  # fmt: skip
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
    total = sum(len(job.content.starts(tools.dataset.lengths[e])) for i in todo for e in job.parts[i])
    done = 0
    with Workers(workers) as team:
        work: Callable[[int], int] = tools.make if team.here else partial(make_in_worker, job)
        for _, clips in team.each(work, todo):
            done += clips
            report("encoding", done, max(total, done))


def _survey(dataset: Dataset, content: Content, skip_bad: bool) -> tuple[list[int], list[str], dict[int, str]]:
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
        if content.starts(length):
            kept.append(index)
    if not kept:
        raise SimForcingError(
            f"{dataset.root}: no episode has the {content.rule.steps} rows of a window; use a shorter clip rule"
        )
    return kept, sorted(tasks), bad


def cut(kept: Sequence[int], counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Episodes in order, with the number of clips of each, cut into shards of at least `SHARD` clips (not the last)."""
    parts: list[tuple[int, ...]] = []
    part: list[int] = []
    clips = 0
    for index, count in zip(kept, counts, strict=True):
        part.append(index)
        clips += count
        if clips >= SHARD:
            parts.append(tuple(part))
            part, clips = [], 0
    return (*parts, tuple(part)) if part else tuple(parts)


def divided(dataset: Dataset, content: Content, *, without: Sequence[int] = (), val: int | None = None, test: int = 0,
            seed: int = 0) -> dict[str, list[int]]:  # fmt: skip
    """Parts of the episodes that have a window, by position in the dataset; `without` some positions.

    val: episodes for validation, by default a tenth, at least one.

    Raises:
        SimForcingError: none are left to train on.
    """
    places = zip(positions(dataset), dataset.lengths, strict=True)
    kept = [place for place, length in places if place not in without and content.starts(length)]
    val = max(1, len(kept) // 10) if val is None else val
    if kept and len(kept) <= val + test:
        raise SimForcingError(
            f"{dataset.root}: {len(kept)} episodes leave none to train on with {val} for validation and {test} for "
            "testing"
        )
    parts = {"train": None, "val": val, "test": test}
    split = split_episodes(len(kept), parts if kept else {"train": None}, seed)
    return {name: [kept[i] for i in part] for name, part in split.items()}


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
        """What the job is done with, made where it is first needed, in the process that works."""
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
