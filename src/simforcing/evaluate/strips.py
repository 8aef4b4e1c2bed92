"""Pictures of clips side by side: strips for documents, composite videos for pages.

Shapes: T frames, H W pixels of one source, h w pixels of the picture. Sources are uint8 RGB videos of one
size; a video of a single frame is held still for the length of the others.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import matplotlib
import numpy as np
from jaxtyping import Float64, UInt8
from matplotlib import colormaps
from PIL import Image, ImageDraw, ImageFont

from simforcing.data.video import VideoWriter
from simforcing.errors import SimForcingError
from simforcing.files import partial_path

Video: TypeAlias = UInt8[np.ndarray, "T H W 3"]
Picture: TypeAlias = UInt8[np.ndarray, "h w 3"]

BACKGROUND = (22, 24, 29)
INK = (214, 217, 222)
ERROR_CEILING = 96
"""Grey levels of 255 at which an error map reaches its brightest colour, the same for every clip and
page."""
GAP = 4
FONT = str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"))
"""Comes with matplotlib, so a strip looks the same everywhere."""


def error_map(pred: Video, true: Video, ceiling: int = ERROR_CEILING) -> Video:
    """|pred - true|, mean over RGB, as a heat map: black where equal, brightest at ``ceiling``."""
    if pred.shape != true.shape:
        raise SimForcingError(f"an error map needs videos of one shape, got {list(pred.shape)} and {list(true.shape)}")
    error: Float64[np.ndarray, "T H W"] = np.abs(pred.astype(np.float64) - true.astype(np.float64)).mean(-1)
    colours = colormaps["inferno"](np.clip(error / ceiling, 0, 1))[..., :3]
    return np.asarray(np.rint(colours * 255), dtype=np.uint8)


def align(videos: Mapping[str, Video]) -> dict[str, Video]:
    """The same videos with one length: single frames are repeated.

    Raises `SimForcingError` for no videos and for unequal shapes, naming them.
    """
    if not videos:
        raise SimForcingError("no videos to show; give at least one source")
    for name, video in videos.items():
        if video.dtype != np.uint8 or video.ndim != 4 or video.shape[-1] != 3 or 0 in video.shape:
            raise SimForcingError(f"video '{name}' must be uint8 [T, H, W, 3], got {video.dtype} {list(video.shape)}")
    length = max(len(video) for video in videos.values())
    same = {name: np.repeat(v, length, axis=0) if len(v) == 1 else v for name, v in videos.items()}
    first_name, first = next(iter(same.items()))
    for name, video in same.items():
        if video.shape != first.shape:
            raise SimForcingError(
                f"videos '{first_name}' and '{name}' differ in shape: {list(first.shape)} and {list(video.shape)}"
            )
    return same


def grid(rows: Sequence[Mapping[str, Video]], scale: int = 4) -> Video:
    """One video of all, in step: a row a clip, a column a source, enlarged by ``scale`` (Lanczos).

    All rows must name the same sources in the same order. Height and width of the result are even, as video
    encoders ask for.
    """
    aligned = [align(row) for row in rows]
    if not aligned or any(list(row) != list(aligned[0]) for row in aligned):
        raise SimForcingError("a grid needs one or more clips, all with the same sources in the same order")
    lines = []
    for row in aligned:
        cells = [np.stack([_enlarge(frame, scale) for frame in video]) for video in row.values()]
        lines.append(_join(cells, axis=2))
    if len({line.shape for line in lines}) > 1:
        raise SimForcingError("clips of one grid must share length and frame size")
    return _even(_join(lines, axis=1))


def hold(frames: Video, times: int) -> Video:
    """The video with its last frame repeated, so that a loop rests before it starts again."""
    return np.concatenate([frames, np.repeat(frames[-1:], times, axis=0)])


def strip(videos: Mapping[str, Video], path: str | Path, *, columns: int = 7, scale: int = 3) -> Path:
    """Write a PNG of a clip: a labelled row a source, ``columns`` frames evenly from first to last."""
    return save_png(strip_picture(videos, columns=columns, scale=scale), path)


def save_png(picture: Picture, path: str | Path) -> Path:
    """Write a picture as PNG, whole or not at all; folders are made as needed."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(target)
    try:
        Image.fromarray(picture).save(partial, format="PNG", compress_level=4)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def strip_picture(videos: Mapping[str, Video], *, columns: int = 7, scale: int = 3) -> Picture:
    """The picture of `strip`: sources downwards with their names, frames to the right with their index."""
    aligned = align(videos)
    length, height, width = next(iter(aligned.values())).shape[:3]
    shown = np.unique(np.rint(np.linspace(0, length - 1, min(columns, length))).astype(int))
    cell_height, cell_width = height * scale, width * scale
    font = ImageFont.truetype(FONT, size=max(11, min(17, cell_height // 9)))
    margin, top = int(max(font.getlength(name) for name in aligned)) + 24, 32
    size = (
        margin + len(shown) * (cell_width + GAP) - GAP + 8,
        top + len(aligned) * (cell_height + GAP) - GAP + 8,
    )
    canvas = Image.new("RGB", size, BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    for column, t in enumerate(shown):
        x = margin + column * (cell_width + GAP)
        draw.text((x + cell_width // 2, top // 2), f"frame {t}", fill=INK, font=font, anchor="mm")
        for row, (name, video) in enumerate(aligned.items()):
            y = top + row * (cell_height + GAP)
            canvas.paste(Image.fromarray(_enlarge(video[t], scale)), (x, y))
            if column == 0:
                draw.text((margin - 12, y + cell_height // 2), name, fill=INK, font=font, anchor="rm")
    return np.asarray(canvas, dtype=np.uint8)


def write_mp4(path: str | Path, frames: Video, fps: float, *, crf: int = 20) -> Path:
    """Write frames as an H.264 MP4 (yuv420p) that browsers play; odd sizes are padded by a pixel."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(target)
    padded = _even(frames)
    writer = VideoWriter(partial, fps=fps, height=padded.shape[1], width=padded.shape[2], crf=crf)
    try:
        writer.write(padded)
        writer.close()
        os.replace(partial, target)
    finally:
        writer.abort()
        partial.unlink(missing_ok=True)
    return target


def _enlarge(frame: UInt8[np.ndarray, "H W 3"], scale: int) -> Picture:
    if scale == 1:
        return frame
    size = (frame.shape[1] * scale, frame.shape[0] * scale)
    return np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS), dtype=np.uint8)


def _join(videos: Sequence[Video], axis: int) -> Video:
    """Videos beside (axis 2) or under (axis 1) each other with a gap of the background colour."""
    parts: list[Video] = []
    for video in videos:
        if parts:
            shape = list(video.shape)
            shape[axis] = GAP
            parts.append(np.broadcast_to(np.array(BACKGROUND, dtype=np.uint8), shape))
        parts.append(video)
    return np.concatenate(parts, axis=axis)


def _even(frames: Video) -> Video:
    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return frames
