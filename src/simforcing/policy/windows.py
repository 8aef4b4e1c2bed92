"""Which frames, actions and states make one sample of a policy, and what is stored of it in a cache.

Legend: k windows, T frames, H W stored pixels, h w pixels of one camera, K cameras, A action steps, a action numbers,
F latent frames.

A window begins at any row of an episode. Beyond the end the last row is repeated and marked as padded. (FastWAM.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float32, UInt8
from torch import Tensor

from simforcing.data.episode import REAL, SIM, ActionConvention, Dataset, Episode, nearest
from simforcing.data.windows import ClipRule
from simforcing.errors import SimForcingError
from simforcing.model.codec import Codec
from simforcing.policy.preparation import side_by_side
from simforcing.train.encode import Latents, described, grouped, together

AfterEnd = Literal["still", "last"]

LATENTS = "real"
"""Name of the latents in a cache of this kind."""

MAX_CAMERAS = 2
"""Cameras that are taken where nobody chooses."""


@dataclass(frozen=True)
class PolicyWindows:
    """Content of a policy's cache (see `train.encode.Content`).

    rule: of all cameras side by side. cameras: from left to right. after_end: what a robot is told beyond the end:
    `still` is a change of nothing with the gripper as it was last (for actions that are changes, as FastWAM does);
    `last` repeats the last action (for actions that are poses).
    """

    rule: ClipRule
    cameras: tuple[str, ...]
    after_end: AfterEnd = "still"
    every: int = 1

    def starts(self, length: int) -> Sequence[int]:
        """First rows of all windows: any row may be one, `every` rows apart."""
        return range(0, length, self.every)

    def header(self, dataset: Dataset, codec: Codec) -> dict[str, Any]:
        """Whatever would make the cache another one; `cameras` with the size of their recordings.

        Raises:
            SimForcingError: a camera is unknown, or the windows do not fit the codec.
        """
        codec.latent_shape(self.rule.frames, self.rule.height, self.rule.width)
        episode = dataset[0]
        sizes = {camera: episode.frames(camera, [0]).shape[1:3] for camera in self.cameras}
        return {
            "kind": "policy",
            "codec": codec.identity,
            "normalisation": {"pixels": [-1, 1], "latents": "codec", "actions": "as stored", "stored": "float16"},
            "cameras": {camera: list(size) for camera, size in sizes.items()},
            "left_to_right": list(self.cameras),
            "after_end": self.after_end,
            **described(dataset, self.rule, self.every),
        }

    def arrays(self, episode: Episode, first: Sequence[int], latents: Latents) -> dict[str, np.ndarray]:
        """Actions, state at the first row, what of both is padded, and latents of the cameras."""
        rule, last = self.rule, episode.length - 1
        action, action_padded = zip(*(self.actions(episode.action, s) for s in first), strict=True)
        rows = np.array(first)[:, None] + np.arange(rule.frames) * rule.stride
        pictures = grouped(np.minimum(rows, last).tolist(), lambda rows: self._pictures(episode, rows), together(rule))
        return {
            "action": np.stack(action),
            "action_padded": np.stack(action_padded),
            "proprio": episode.state[list(first)],
            "padded": latents_padded(rows > last),
            LATENTS: np.concatenate([latents(video.transpose(1, 2)) for video in pictures]),
        }

    def actions(
        self, actions: Float32[np.ndarray, "N a"], start: int
    ) -> tuple[Float32[np.ndarray, "A a"], Bool[np.ndarray, " A"]]:
        """Recorded actions from a row on, and which of them lie beyond the end."""
        rows = np.arange(start, start + self.rule.actions)
        padded = rows >= len(actions)
        window = actions[np.minimum(rows, len(actions) - 1)].copy()
        if self.after_end == "still":
            window[padded, :-1] = 0
        return window, padded

    def _pictures(self, episode: Episode, rows: list[int]) -> Float32[Tensor, "n 3 h K*w"]:
        views: list[UInt8[np.ndarray, "n H W 3"]] = [episode.frames(camera, rows) for camera in self.cameras]
        return side_by_side(views, self.rule.height, self.rule.width // len(self.cameras))


def latents_padded(frames: Bool[np.ndarray, "k T"]) -> Bool[np.ndarray, "k F"]:
    """Whether all pictures of a latent frame are padded; the first latent frame holds the first picture alone."""
    later = frames[:, 1:].reshape(len(frames), -1, Codec.temporal_stride).all(axis=2)
    return np.concatenate([frames[:, :1], later], axis=1)


def after_end(convention: ActionConvention) -> AfterEnd:
    """What a robot is told beyond the end of an episode, by what its actions mean."""
    return "still" if convention.kind == "delta" else "last"


def chosen_cameras(dataset: Dataset, wanted: Sequence[str] = ()) -> tuple[str, ...]:
    """The cameras that are asked for; where none are, all of a dataset that has one or two besides the simulated view.

    Raises:
        SimForcingError: a camera is unknown or named twice, or there are too many to choose from.
    """
    for name in wanted:
        if name not in dataset.cameras:
            raise SimForcingError(f"{dataset.root}: no camera {name!r}; {nearest(name, dataset.cameras)}")
    if len(set(wanted)) < len(wanted):
        raise SimForcingError(f"cameras {', '.join(wanted)}: one is named twice")
    if wanted:
        return tuple(wanted)
    found = tuple(name for name in dataset.cameras if name != SIM)
    if REAL in found:
        return (REAL,)
    if not 1 <= len(found) <= MAX_CAMERAS:
        raise SimForcingError(
            f"{dataset.root} has {len(found)} cameras ({', '.join(found) or 'none'}); say with --cameras which ones "
            "the policy looks at, from left to right"
        )
    return found
