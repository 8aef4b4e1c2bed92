"""The clips that an evaluation is about.

Legend: N clips, T frames, H W pixels, A actions.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from simforcing.data.cache import source_hash
from simforcing.data.episode import REAL, SIM, Dataset
from simforcing.data.windows import ClipRule, load_clip, load_split, other_episodes, split_source, starts
from simforcing.errors import SimForcingError
from simforcing.predict.predictor import Start


@dataclass(frozen=True)
class EvaluationClips:
    """Held-out windows with both views; `seeds` of the noise follow from episode and start.

    short: held-out episodes that have no window, since they are shorter than one.
    """

    real: UInt8[np.ndarray, "N T H W 3"]
    sim: UInt8[np.ndarray, "N T H W 3"]
    action: Float32[np.ndarray, "N A a"]
    proprio: Float32[np.ndarray, "N p"]
    tasks: list[str]
    episode: Int64[np.ndarray, " N"]
    start: Int64[np.ndarray, " N"]
    fps: float
    short: tuple[int, ...] = ()

    @property
    def left_out(self) -> str:
        """One line about the episodes that are too short."""
        numbers = ", ".join(map(str, self.short[:8])) + (", ..." if len(self.short) > 8 else "")
        return f"{len(self.short)} held-out episodes are shorter than a window and left out: {numbers}"

    def __len__(self) -> int:
        return len(self.tasks)

    def begin(self, seed: int = 0) -> Start:
        """What a model is given."""
        noise = [
            int(np.random.SeedSequence([seed, e, s]).generate_state(1)[0])
            for e, s in zip(self.episode, self.start, strict=True)
        ]
        return Start(self.real[:, 0], self.action, self.proprio, self.tasks, self.sim[:, 0], noise)

    def others(self) -> Int64[np.ndarray, " N"]:
        """For each clip one of another episode, as `other_episodes` finds them: for exchanged actions."""
        return other_episodes(self.episode)

    def window_names(self) -> list[tuple[int, int]]:
        """(episode, start) of every clip."""
        return [(int(e), int(s)) for e, s in zip(self.episode, self.start, strict=True)]


def held_out(dataset: Dataset, split: Path, part: str) -> list[int]:
    """The episodes of one part of a split file.

    Raises:
        SimForcingError: the part is empty, or the file divides another dataset.
    """
    episodes = load_split(split).get(part, [])
    if not episodes:
        other = "--part val" if part == "test" else "--part test"
        raise SimForcingError(f"{split} has no episodes in '{part}'; use {other}, or encode with --{part} N")
    if max(episodes) >= len(dataset):
        raise SimForcingError(
            f"{split} names episode {max(episodes)}, but {dataset.root} has {len(dataset)} episodes; give the dataset "
            "that was encoded"
        )
    source = split_source(split)
    if source and source != source_hash(dataset.root):
        raise SimForcingError(
            f"{split} divides another dataset than {dataset.root}, or that one has changed since; give the dataset "
            "that was encoded"
        )
    return episodes


def evaluation_clips(dataset: Dataset, rule: ClipRule, episodes: list[int], per_episode: int = 1) -> EvaluationClips:
    """`per_episode` windows of each episode, evenly placed.

    Raises:
        SimForcingError: the dataset is not paired, no window is asked for, or no episode is long enough.
    """
    if per_episode < 1:
        raise SimForcingError(f"{per_episode} windows of each episode: give at least 1")
    for key in (REAL, SIM):
        if key not in dataset.cameras:
            raise SimForcingError(
                f"{dataset.root} has no {key}; evaluation needs a paired dataset (simforcing twin pair)"
            )
    clips = []
    for index in episodes:
        possible = starts(dataset.lengths[index], rule)
        if possible:
            chosen = np.unique(np.linspace(0, len(possible) - 1, per_episode + 2).round().astype(int)[1:-1])
            episode = dataset[index]
            clips += [load_clip(episode, possible[i], rule, (REAL, SIM)) for i in chosen]
    if not clips:
        raise SimForcingError(
            f"{dataset.root}: none of the episodes {episodes[:8]} has the {rule.steps} rows of a window"
        )
    return EvaluationClips(
        real=np.stack([c.frames[REAL] for c in clips]),
        sim=np.stack([c.frames[SIM] for c in clips]),
        action=np.stack([c.action for c in clips]),
        proprio=np.stack([c.proprio for c in clips]),
        tasks=[c.task for c in clips],
        episode=np.array([c.episode for c in clips], np.int64),
        start=np.array([c.start for c in clips], np.int64),
        fps=dataset.fps / rule.stride,
        short=tuple(i for i in episodes if not starts(dataset.lengths[i], rule)),
    )
