"""Video files: an H.264 encoder that streams and repeats itself exactly, and a decoder that reads only what
is asked for.

Shapes: n frames asked for, T frames given, H W picture size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

import av
import numpy as np
from av.codec.context import Flags
from av.container import InputContainer
from av.video.frame import PictureType, VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from jaxtyping import UInt8

from simforcing.data.problems import Problems
from simforcing.errors import SimForcingError

GOP = 8
"""Frames from one keyframe to the next, so that a window costs at most GOP - 1 extra frames to decode."""

MATCH = 0.25
"""A decoded frame is the one asked for if its time differs by less than this fraction of a frame."""

Picture: TypeAlias = UInt8[np.ndarray, "H W 3"]

_POINTERS = (b"version https://git-lfs", b"/annex/objects/", b"../.git/annex")


def rate(fps: float) -> Fraction:
    """Frames a second as the fraction that a container stores (29.97 -> 2997/100)."""
    if not fps > 0:
        raise SimForcingError(f"video: fps is {fps}; give a positive number")
    return Fraction(fps).limit_denominator(1001)


class VideoWriter:
    """Streams RGB frames into one H.264 yuv420p MP4; memory does not grow with the number of frames.

    One encoder thread, no B-frames, a keyframe at least every `GOP` frames, index at the front of the file,
    no dates: the same frames give the same bytes. `bytes` counts what has been encoded so far and `count` the
    frames. Raises SimForcingError if height or width is odd (yuv420p needs even sizes).
    """

    def __init__(self, path: Path, *, fps: float, height: int, width: int, crf: int = 12) -> None:
        if height < 2 or width < 2 or height % 2 or width % 2:
            raise SimForcingError(f"{path}: video size {height}x{width}; give an even height and width (yuv420p)")
        self.path = path
        self.count = 0
        self.bytes = 0
        self._rate = rate(fps)
        self._shape = (height, width, 3)
        options = {"movflags": "+faststart", "fflags": "+bitexact"}
        self._container = av.open(str(path), "w", format="mp4", options=options)
        x264 = {"crf": str(crf), "preset": "veryfast", "forced-idr": "1", "sc_threshold": "0", "threads": "1"}
        x264["mbtree"] = "0"  # it looks for motion with numbers that nobody set where a row has an odd count of blocks
        stream: VideoStream = self._container.add_stream("libx264", rate=self._rate, options=x264)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.gop_size, stream.max_b_frames = GOP, 0
        stream.codec_context.thread_count = 1
        stream.codec_context.time_base = 1 / self._rate
        stream.codec_context.flags |= Flags.bitexact
        self._stream = stream

    def write(self, frames: UInt8[np.ndarray, "T H W 3"]) -> None:
        """Append frames; the first of each call becomes a keyframe."""
        if frames.dtype != np.uint8 or frames.shape[1:] != self._shape:
            raise SimForcingError(
                f"{self.path}: got {frames.dtype} frames {list(frames.shape)}; "
                f"give uint8 [T, {self._shape[0]}, {self._shape[1]}, 3]"
            )
        for i, rgb in enumerate(frames):
            frame = VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24")
            frame.pts, frame.time_base = self.count, 1 / self._rate
            frame.pict_type = PictureType.I if i == 0 else PictureType.NONE
            self._mux(frame)
            self.count += 1

    def _mux(self, frame: VideoFrame | None) -> None:
        for packet in self._stream.encode(frame):
            self.bytes += packet.size
            self._container.mux(packet)

    def close(self) -> None:
        """Finish the file and close it."""
        try:
            self._mux(None)
        finally:
            self._container.close()

    def abort(self) -> None:
        """Let go of the file, whatever state it is in; the caller deletes it."""
        with suppress(av.FFmpegError):
            self.close()


@dataclass(frozen=True)
class Probe:
    """Header of a video file: picture size, frames a second, number of frames (0: not said) and codec."""

    height: int
    width: int
    fps: float
    frames: int
    codec: str


class VideoFile:
    """One video file to read from; opened for each call, so it can be pickled and shared between processes.

    fps: the rate that the data set states; a file with another rate is refused. None: the file's own, whatever
    it is (where frames are known to be one a row). `decoded` counts all frames that were decoded so far, also
    those passed over on the way to the ones asked for.
    """

    def __init__(self, path: Path, fps: float | None) -> None:
        self.path = path
        self.stated = fps
        self.decoded = 0
        self._probe: Probe | None = None

    @property
    def fps(self) -> float:
        """Frames a second as stated, else of the container. Raises SimForcingError if the file cannot be read."""
        return self.stated if self.stated is not None else self.probe().fps

    def probe(self) -> Probe:
        """What the file's header says; read once. Raises SimForcingError if it cannot be read."""
        if self._probe is None:
            self.check()
            try:
                with av.open(str(self.path)) as container:
                    if not container.streams.video:
                        raise SimForcingError(f"{self.path}: no video stream in it; re-export the dataset")
                    stream = container.streams.video[0]
                    fps = float(stream.average_rate or stream.guessed_rate or 0)
                    size = (stream.codec_context.height, stream.codec_context.width)
                    self._probe = Probe(size[0], size[1], fps, stream.frames, stream.codec_context.codec.canonical_name)
            except av.FFmpegError as error:
                raise SimForcingError(f"{self.path}: cannot be opened ({error.strerror}); restore the file") from error
        return self._probe

    def check(self) -> None:
        """Cheap look from outside. Raises SimForcingError if missing, empty or only a pointer to a file."""
        fault = self.fault()
        if fault is not None:
            raise SimForcingError(fault[1])

    def report(self, problems: Problems, episode: int | None = None) -> None:
        """As `check`, but reports."""
        fault = self.fault()
        if fault is not None:
            problems.error(fault[0], fault[1], episode=episode, file=self.path)

    def fault(self) -> tuple[str, str] | None:
        """What is wrong with the file from outside, as kind and message."""
        try:
            with self.path.open("rb") as file:
                head = file.read(200)
        except OSError:
            return "missing_video", f"{self.path}: video file is missing; download or restore it"
        if not head:
            return "empty_video", f"{self.path}: video file has zero bytes; download or restore it"
        if any(mark in head for mark in _POINTERS):
            message = f"{self.path}: only a pointer, not the video; fetch the content (git lfs pull)"
            return "pointer_video", message
        return None

    def at(self, times: Sequence[float]) -> UInt8[np.ndarray, "n H W 3"]:
        """RGB frames at the given times (seconds from the start of the file), in the order given.

        Seeks to the keyframe before each run of frames and decodes forward from there. Raises SimForcingError
        if the file cannot be read, has another frame rate, or has no frame within a quarter frame of a time.
        """
        self.check()
        order = sorted(set(times))
        found: dict[float, Picture] = {}
        try:
            with av.open(str(self.path)) as container:
                if not container.streams.video:
                    raise SimForcingError(f"{self.path}: no video stream in it; re-export the dataset")
                stream = container.streams.video[0]
                self._check_rate(stream)
                empty = np.empty((0, stream.height, stream.width, 3), np.uint8)
                stream.codec_context.thread_count = 1
                stream.codec_context.options = {"err_detect": "explode"}
                self._collect(container, stream, order, found)
        except av.FFmpegError as error:
            raise SimForcingError(f"{self.path}: cannot be decoded ({error.strerror}); restore the file") from error
        for time in order:
            if time not in found:
                raise SimForcingError(
                    f"{self.path}: no frame at {time:.3f} s; "
                    "the file is cut short or the dataset's timestamps are wrong"
                )
        return np.stack([found[time] for time in times]) if times else empty

    def _check_rate(self, stream: VideoStream) -> None:
        actual = stream.average_rate
        if actual is not None and abs(float(actual) - self.fps) > 0.02 * self.fps:
            raise SimForcingError(
                f"{self.path}: runs at {float(actual):g} frames a second, the dataset says {self.fps:g}; "
                "correct one of them"
            )

    def _collect(
        self,
        container: InputContainer,
        stream: VideoStream,
        order: Sequence[float],
        found: dict[float, Picture],
    ) -> None:
        """Fill `found` for the ascending times in `order`, seeking only where that saves decoding."""
        base = float(stream.time_base or 1)
        for run in self._runs(stream, order, base):
            target = int((run[0] + MATCH / self.fps) / base) if run[0] else 0
            # From the keyframe before; from the one before that, which pictures shown before a keyframe may
            # need; from the front, where every sound file decodes.
            for start in (target, max(_key_before(stream, target) - 1, 1), 0):
                container.seek(start, stream=stream)
                try:
                    if self._decode_run(container, stream, run, found):
                        break
                except av.InvalidDataError:
                    if start == 0:
                        raise

    def _runs(self, stream: VideoStream, order: Sequence[float], base: float) -> list[list[float]]:
        """Cut ascending times where a keyframe in between saves decoding two frames or more."""
        runs: list[list[float]] = []
        for time in order:
            key = _key_before(stream, int(time / base)) * base
            if runs and key - runs[-1][-1] <= 2.0 / self.fps:
                runs[-1].append(time)
            else:
                runs.append([time])
        return runs

    def _decode_run(
        self,
        container: InputContainer,
        stream: VideoStream,
        run: Sequence[float],
        found: dict[float, Picture],
    ) -> bool:
        """Decode forward, keep the frames of one run; False if decoding began after the first of them."""
        slack = MATCH / self.fps
        wanted = deque(run)
        rgb = VideoReformatter()  # one for all frames: it keeps its tables
        first = True
        for frame in _frames(container, stream):
            self.decoded += 1
            if first and frame.time > wanted[0] + slack:
                return False
            first = False
            while wanted and frame.time > wanted[0] + slack:
                wanted.popleft()
            if wanted and abs(frame.time - wanted[0]) <= slack:
                found[wanted.popleft()] = rgb.reformat(frame, format="rgb24").to_ndarray()
            if not wanted:
                return True
        return True


def _key_before(stream: VideoStream, timestamp: int) -> int:
    """Timestamp of the last keyframe at or before another, in the stream's time base (0 if none)."""
    entry = stream.index_entries.search_timestamp(timestamp)
    return stream.index_entries[entry].timestamp if entry >= 0 else 0


def _frames(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """Decode from the current position, a keyframe; any damage raises.

    Pictures that are shown before that keyframe may refer to what lies before it; they are left out.
    """
    first: int | None = None
    for packet in container.demux(stream):
        if first is None:
            first = packet.pts
        try:
            frames = packet.decode()
        except av.InvalidDataError:
            if first is None or packet.pts is None or packet.pts >= first:
                raise
            continue
        yield from frames
