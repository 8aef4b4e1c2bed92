"""Checks of an audit that decode pictures: damage, timing, black and frozen cameras, lag behind the action.

Every file is decoded once, in order, to small grey pictures of which only three numbers a frame are kept.

Shapes: n frames of a file or an episode, h w size of a small grey picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from jaxtyping import Float, Float32

from simforcing.data.problems import Problems
from simforcing.data.source import Footage, PictureFootage, Source, VideoFootage
from simforcing.data.video import MATCH, VideoFile
from simforcing.errors import SimForcingError

WIDTH = 96
"""Width of the small pictures."""

BLACK_MEAN, BLACK_SPREAD = 12.0, 4.0
"""A picture darker than this on average (of 255), with less spread than this, is black."""

FROZEN = 0.02
"""Grey levels by which pictures must differ on average to be two pictures."""


@dataclass
class Looks:
    """Three numbers for each frame of a file (or half of it): mean, spread, and mean change from the frame before.

    times: seconds in the file. fault: how decoding ended, if not well. size: height and width of the full picture.
    """

    times: Float[np.ndarray, "n"]
    mean: Float[np.ndarray, "n"]
    spread: Float[np.ndarray, "n"]
    change: Float[np.ndarray, "n"]
    fault: str | None = None
    size: tuple[int, int] = (0, 0)

    def cut(self, rows: Sequence[int]) -> Looks:
        """Some frames of it; the change of the first is not of this episode and zero."""
        index = np.asarray(rows, int)
        change = self.change[index].copy()
        change[:1] = 0
        return Looks(self.times[index], self.mean[index], self.spread[index], change, None, self.size)


@dataclass
class Look:
    """What became of one camera of one episode; `looks` is None where it cannot be decoded."""

    source: Source
    camera: str
    looks: Looks | None


@dataclass
class _Gather:
    """Collects the three numbers, frame by frame."""

    times: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)
    change: list[float] = field(default_factory=list)
    last: Float32[np.ndarray, "h w"] | None = None

    def add(self, time: float, grey: np.ndarray) -> None:
        """Takes in a frame: its time in seconds, and its grey picture [h, w]."""
        picture = grey.astype(np.float32)
        last = self.last
        self.times.append(time)
        self.mean.append(float(picture.mean()))
        self.spread.append(float(picture.std()))
        self.change.append(0.0 if last is None or last.shape != picture.shape else float(np.abs(picture - last).mean()))
        self.last = picture

    def done(self, fault: str | None, size: tuple[int, int]) -> Looks:
        """What was seen; `size` is height and width, `fault` where decoding stopped early."""
        columns = (np.asarray(values, np.float64) for values in (self.times, self.mean, self.spread, self.change))
        times, mean, spread, change = columns
        return Looks(times, mean, spread, change, fault, size)


def look_at_file(path: Path, half: str | None = None) -> Looks:
    """Decode a video from front to end, as far as it goes. Raises SimForcingError if it has no video stream."""
    gather, size = _Gather(), (0, 0)
    fault: str | None = None
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise SimForcingError(f"{path}: no video stream in it; re-export the dataset")
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            stream.codec_context.options = {"err_detect": "explode"}
            size = (stream.codec_context.height, stream.codec_context.width)
            scaler = VideoReformatter()
            small = (max(round(size[0] * WIDTH / max(size[1], 1)), 2), WIDTH)
            for frame in container.decode(stream):
                grey = scaler.reformat(
                    frame, width=small[1], height=small[0], format="gray", interpolation="AREA"
                ).to_ndarray()
                gather.add(float("nan") if frame.pts is None else frame.time, _half(grey, half))
    except av.FFmpegError as error:
        fault = error.strerror or type(error).__name__
    return gather.done(fault, size)


def _half(grey: np.ndarray, half: str | None) -> np.ndarray:
    if half is None:
        return grey
    middle = grey.shape[1] // 2
    return grey[:, :middle] if half == "left" else grey[:, middle:]


def _look_at_pictures(footage: PictureFootage) -> Looks:
    gather, size = _Gather(), (0, 0)
    fault: str | None = None
    try:
        for row in range(footage.count() or 0):
            frame = footage.at([row])[0]
            size = (frame.shape[0], frame.shape[1])
            step = max(frame.shape[1] // WIDTH, 1)
            gather.add(float(row), frame[::step, ::step].mean(axis=2))
    except SimForcingError as error:
        fault = str(error)
    return gather.done(fault, size)


def look(
    sources: Sequence[Source], fps: float, problems: Problems, report: Callable[[int, int], None]
) -> Iterator[Look]:
    """Decodes all footage, file by file, checks each file and yields what its episodes look like."""
    files: dict[tuple[Path, str], list[tuple[Source, str, Footage]]] = {}
    for source in sources:
        for camera, footage in source.footage.items():
            name = footage.name if isinstance(footage, PictureFootage) else footage.half or ""
            key = (footage.path, f"{name} {source.index if isinstance(footage, PictureFootage) else ''}")
            files.setdefault(key, []).append((source, camera, footage))
    for done, users in enumerate(files.values()):
        first = users[0][2]
        if isinstance(first, PictureFootage):
            yield _check_pictures(users[0][0], users[0][1], first, problems)
        else:
            yield from _check_file(users, first, fps, problems)
        report(done + 1, len(files))


def _check_pictures(source: Source, camera: str, footage: PictureFootage, problems: Problems) -> Look:
    looks = _look_at_pictures(footage)
    if looks.fault is not None:
        message = f"{source.where}: {looks.fault}"
        problems.error("undecodable_picture", message, episode=source.index, file=footage.path)
        return Look(source, camera, None)
    if source.length is not None and len(looks.mean) != source.length:
        message = f"{source.where}: {source.length} rows but {len(looks.mean)} pictures of {camera}; re-export"
        problems.error("length_mismatch", message, episode=source.index, file=footage.path)
    return Look(source, camera, looks)


def _check_file(
    users: Sequence[tuple[Source, str, Footage]], first: VideoFootage, fps: float, problems: Problems
) -> Iterator[Look]:
    path, file = first.path, first.file
    if file.fault() is not None:  # reported when the dataset was opened
        yield from (Look(source, camera, None) for source, camera, _ in users)
        return
    try:
        frames = file.probe().frames
        looks = look_at_file(path, first.half)
    except SimForcingError as error:
        for source, camera, _ in users:
            problems.error("undecodable_video", f"{source.where}: {error}", episode=source.index, file=path)
            yield Look(source, camera, None)
        return
    count = len(looks.mean)
    whole = looks.fault is None and (frames == 0 or count >= frames)
    _check_timing(users, file, looks, fps, problems)
    for source, camera, footage in users:
        assert isinstance(footage, VideoFootage)
        length = footage.stated if footage.stated is not None else count if whole else max(frames, count)
        begin = round(footage.start * file.fps)
        if begin + length <= count:
            seen = looks.cut(range(begin, begin + length))
            _check_places(source, footage, seen, problems)
            yield Look(source, camera, seen)
            continue
        have, reason = max(count - begin, 0), f" ({looks.fault})" if looks.fault else ""
        kind = "undecodable_video" if count == 0 else "truncated_video"
        message = (
            f"{source.where}: only {have} of {length} frames of {camera} can be decoded{reason} from {path}; restore it"
        )
        problems.error(kind, message, episode=source.index, file=path)
        yield Look(source, camera, None)
    if whole and first.stated is not None and first.half is None:
        _check_use(users, path, count, file.fps, problems)


def _check_use(
    users: Sequence[tuple[Source, str, Footage]], path: Path, count: int, fps: float, problems: Problems
) -> None:
    """Whether the episodes of a packed file share it out: no frame twice, none left over."""
    spans = [(round(f.start * fps), f.stated or 0, s) for s, _, f in users if isinstance(f, VideoFootage)]
    spans.sort(key=lambda span: span[0])
    for (start, length, source), (after, _, other) in pairwise(spans):
        if after < start + length:
            message = f"{other.where}: shares frames of {path} with episode {source.index}"
            problems.warn("contradicting_metadata", message, episode=other.index, file=path)
    used = max(start + length for start, length, _ in spans)
    if count > used:
        problems.warn("length_mismatch", f"{path}: has {count} frames, of which episodes use {used}", file=path)


def _check_places(source: Source, footage: VideoFootage, looks: Looks, problems: Problems) -> None:
    """Whether every frame is at the time at which its row is looked for."""
    if len(looks.times) == 0:
        return
    late = np.abs((looks.times - footage.start) * footage.file.fps - np.arange(len(looks.times)))
    if not late.max() <= MATCH:
        row, path = int(late.argmax()), footage.path
        message = f"{source.where}: frame of row {row} is {late[row]:.2f} frames from where it should be in {path}"
        problems.error(
            "timestamps",
            f"{message}; re-encode it at {footage.file.fps:g} frames a second",
            episode=source.index,
            file=path,
        )


def _check_timing(
    users: Sequence[tuple[Source, str, Footage]], file: VideoFile, looks: Looks, fps: float, problems: Problems
) -> None:
    source, alone = users[0][0], len(users) == 1
    episode, where = (source.index, source.where) if alone else (None, str(file.path))
    _check_rate([user for user, _, _ in users], file, fps, problems)
    container = file.probe().fps
    if len(looks.times) < 2 or not np.isfinite(looks.times).all():
        return
    steps = np.diff(looks.times) * container
    if (steps <= 1e-3).any():
        row = int(np.argmax(steps <= 1e-3)) + 1
        message = f"{where}: time of frame {row} of {file.path} repeats"
        problems.warn("timestamp_repeat", message, episode=episode, file=file.path)
    elif np.abs(steps - 1).max() > 0.1:
        row = int(np.abs(steps - 1).argmax()) + 1
        message = (
            f"{where}: frames of {file.path} are not evenly spaced (frame {row} after {steps[row - 1]:.2f} frames)"
        )
        problems.warn("timestamp_jitter", message, episode=episode, file=file.path)


def check_headers(sources: Sequence[Source], fps: float, problems: Problems) -> None:
    """What the files' headers alone tell, for audits that decode nothing: whether they open, and their rate."""
    for source in sources:
        for footage in source.footage.values():
            if isinstance(footage, PictureFootage) or footage.file.fault() is not None:
                continue
            try:
                _check_rate([source], footage.file, fps, problems)
            except SimForcingError as error:
                message = f"{source.where}: {error}"
                problems.error("undecodable_video", message, episode=source.index, file=footage.path)


def _check_rate(sources: Sequence[Source], file: VideoFile, fps: float, problems: Problems) -> None:
    """The rate of a file: an error where frames are found by their time, else a warning."""
    container = file.probe().fps
    if abs(container - fps) <= 0.02 * fps:
        return
    for source in sources:
        message = f"{source.where}: {file.path} says {container:g} frames a second, the data have {fps:g}"
        if file.stated is None:
            message = f"{message}; frames are taken in order"
            problems.warn("container_fps", message, episode=source.index, file=file.path)
        else:
            problems.error("container_fps", f"{message}; correct one", episode=source.index, file=file.path)


def check_looks(found: Look, moving: np.ndarray | None, problems: Problems) -> None:
    """Black and frozen cameras. moving: per row, whether the robot is known to move (None: not known)."""
    looks, source = found.looks, found.source
    if looks is None or len(looks.mean) < 2:
        return
    where = f"{source.where}: camera {found.camera}"
    file = source.footage[found.camera].path
    dark = (looks.mean < BLACK_MEAN) & (looks.spread < BLACK_SPREAD)
    if dark.all() or looks.spread.max() < 1.0:
        word = "black" if dark.all() else "of one colour"
        problems.warn("black_camera", f"{where} is {word} in {file}", episode=source.index, file=file)
        return
    if dark.mean() > 0.1:
        message = f"{where} is black in {int(dark.sum())} of {len(dark)} frames of {file}"
        problems.warn("black_camera", message, episode=source.index, file=file)
    still = looks.change[1:] < FROZEN
    if moving is not None and not moving.any():
        return  # nothing to see
    if still.mean() > 0.95:
        message = f"{where} does not change in {file}: frozen"
        problems.warn("frozen_camera", message, episode=source.index, file=file)
        return
    if moving is not None and len(moving) >= len(looks.change):
        still &= moving[: len(still)]
    run = longest_run(still)
    if run >= max(4, 0.1 * len(still)):
        message = f"{where} repeats one picture for {run + 1} frames of {file} while the robot moves"
        problems.warn("frozen_camera", message, episode=source.index, file=file)


def longest_run(flags: np.ndarray) -> int:
    """Length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return int((edges[1::2] - edges[0::2]).max(initial=0))
