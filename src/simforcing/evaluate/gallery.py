"""The videos of an evaluation, kept beside its numbers.

Legend: N clips, T frames, H W pixels. One MP4 a clip and view in a folder, named after episode and start.
"""

import os
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from simforcing.data.video import VideoFile
from simforcing.errors import SimForcingError
from simforcing.evaluate.clips import EvaluationClips
from simforcing.evaluate.strips import write_mp4
from simforcing.files import partial_path

VIEWS = ("real", "predicted", "simulation", "rendered")
CRF = 8
"""Quality: differences are far below those that are looked at."""


def save_videos(
    folder: Path,
    clips: EvaluationClips,
    predicted: UInt8[np.ndarray, "N T H W 3"],
    simulation: UInt8[np.ndarray, "N T H W 3"] | None,
) -> Path:
    """Writes the folder whole or not at all; `simulation` is what the prediction was conditioned on."""
    partial = partial_path(folder)
    partial.mkdir(parents=True)
    views = {"real": clips.real, "predicted": predicted, "simulation": simulation, "rendered": clips.sim}
    for i, (episode, start) in enumerate(clips.window_names()):
        for view, videos in views.items():
            if videos is not None:
                write_mp4(partial / _file(episode, start, view), videos[i], clips.fps, crf=CRF)
    os.replace(partial, folder)
    return folder


def load_video(folder: Path, window: tuple[int, int], view: str, frames: int, fps: float) -> np.ndarray | None:
    """One video of `VIEWS`, uint8 ``T H W 3``; None where that view was not kept.

    Raises:
        SimForcingError: the file is damaged.
    """
    if view not in VIEWS:
        raise SimForcingError(f"there is no view '{view}'; known: {', '.join(VIEWS)}")
    path = folder / _file(*window, view)
    if not path.is_file():
        return None
    return VideoFile(path, fps).at([i / fps for i in range(frames)])


def _file(episode: int, start: int, view: str) -> str:
    return f"episode-{episode:05d}-row-{start:05d}.{view}.mp4"
