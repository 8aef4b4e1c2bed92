"""The clips that an evaluation is about.

Legend: N clips, T frames, H W pixels, A actions.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from simforcing.data.episode import REAL, SIM, Dataset
from simforcing.data.windows import ClipRule, load_clip, starts
from simforcing.errors import SimForcingError
from simforcing.predict.predictor import Start


@dataclass(frozen=True)
class EvaluationClips:
    """Held-out windows with both views; `seeds` of the noise follow from episode and start."""

    real: UInt8[np.ndarray, "N T H W 3"]
    sim: UInt8[np.ndarray, "N T H W 3"]
    action: Float32[np.ndarray, "N A a"]
    proprio: Float32[np.ndarray, "N p"]
    tasks: list[str]
    episode: Int64[np.ndarray, " N"]
    start: Int64[np.ndarray, " N"]
    fps: float

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
        """For each clip another one, of another episode wherever there is more than one: for exchanged actions."""
        order = np.argsort(self.episode, kind="stable")
        shifted = np.roll(order, -max(int(np.bincount(self.episode).max()), 1))
        result = np.empty(len(self), np.int64)
        result[order] = shifted
        return result

    def window_names(self) -> list[tuple[int, int]]:
        """(episode, start) of every clip."""
        return [(int(e), int(s)) for e, s in zip(self.episode, self.start, strict=True)]


def evaluation_clips(dataset: Dataset, rule: ClipRule, episodes: list[int], per_episode: int = 1) -> EvaluationClips:
    """`per_episode` windows of each episode, evenly placed.

    Raises:
        SimForcingError: the dataset is not paired, or no episode is long enough.
    """
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
    )
