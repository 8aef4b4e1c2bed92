"""What a reader finds on disk, and how a checked `Dataset` is made of it.

A reader makes a `Survey`: what the metadata say, and one `Source` an episode whose rows and pictures are read when
asked for. Nothing there is compared with anything else. `assemble` turns it into a `Dataset` whose episodes are
checked as they are loaded; the audit looks at the same survey and reports instead.

Shapes: N rows of an episode, S state width, A action width, n frames asked for, H W picture size.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt8
from PIL import Image, UnidentifiedImageError

from simforcing.data.episode import ActionConvention, Dataset, Episode, StateConvention
from simforcing.data.problems import Problems
from simforcing.data.video import VideoFile
from simforcing.errors import SimForcingError


@dataclass(frozen=True)
class VideoFootage:
    """Frames of one camera of one episode in a video file; row i is the frame at `start + i / fps` seconds of it.

    stated: frames that the metadata give it; None where the file holds this episode and nothing else. half: the part
    of the picture that is this camera, where two stand side by side.
    """

    file: VideoFile
    start: float = 0.0
    stated: int | None = None
    half: Literal["left", "right"] | None = None

    @property
    def path(self) -> Path:
        """The video file."""
        return self.file.path

    def count(self) -> int | None:
        """Frames of the episode by metadata, else by the file's header (None: that does not say)."""
        return self.stated if self.stated is not None else self.file.probe().frames or None

    def at(self, rows: Sequence[int]) -> UInt8[np.ndarray, "n H W 3"]:
        """RGB frames of some rows, in the order given. Raises SimForcingError as `VideoFile.at` does."""
        return self.cut(self.file.at([self.start + row / self.file.fps for row in rows]))

    def cut(self, frames: UInt8[np.ndarray, "n H W 3"]) -> UInt8[np.ndarray, "n H W 3"]:
        """This camera's part of the file's pictures. Raises SimForcingError for an odd width side by side."""
        if self.half is None:
            return frames
        width, rest = divmod(frames.shape[2], 2)
        if rest:
            raise SimForcingError(f"{self.path}: {frames.shape[2]} pixels wide, not two pictures side by side")
        return frames[:, :, :width] if self.half == "left" else frames[:, :, width:]


@dataclass(frozen=True)
class PictureFootage:
    """Frames of one camera of one episode as encoded pictures (JPEG, PNG) inside a record."""

    path: Path
    name: str
    encoded: Callable[[], Sequence[bytes]] = field(repr=False)

    def count(self) -> int | None:
        """Pictures in the record."""
        return len(self.encoded())

    def at(self, rows: Sequence[int]) -> UInt8[np.ndarray, "n H W 3"]:
        """RGB frames of some rows. Raises SimForcingError for a picture that is missing or damaged."""
        pictures, out = self.encoded(), []
        for row in rows:
            if row >= len(pictures):
                raise SimForcingError(f"{self.path}: {self.name} has {len(pictures)} pictures, none for row {row}")
            try:
                with Image.open(io.BytesIO(pictures[row])) as picture:
                    out.append(np.asarray(picture.convert("RGB")))
            except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
                raise SimForcingError(
                    f"{self.path}: picture {row} of {self.name} cannot be decoded ({error}); restore the file"
                ) from error
        if len({picture.shape for picture in out}) > 1:
            raise SimForcingError(f"{self.path}: pictures of {self.name} differ in size; re-export")
        return np.stack(out) if out else np.empty((0, 0, 0, 3), np.uint8)


Footage = VideoFootage | PictureFootage


@dataclass
class Rows:
    """The numbers of one episode as found; None where there are none. timestamps in seconds, as stored."""

    state: Float32[np.ndarray, "N S"] | None = None
    action: Float32[np.ndarray, "N A"] | None = None
    timestamps: Float64[np.ndarray, "N"] | None = None
    frame_index: Int64[np.ndarray, "N"] | None = None
    tasks: tuple[str, ...] = ()


@dataclass
class Source:
    """One episode as found. where: how messages name it. length: rows, by metadata. file: where its numbers are."""

    index: int
    where: str
    file: Path
    length: int | None
    task: str
    footage: Mapping[str, Footage]
    read: Callable[[Problems], Rows] = field(repr=False)
    name: str = ""

    def decode(self, index: int, camera: str, rows: Sequence[int]) -> UInt8[np.ndarray, "n H W 3"]:
        """Frames of one camera by row number (`index` is this episode's own)."""
        return self.footage[camera].at(rows)


@dataclass
class Survey:
    """What a dataset says of itself. splits: named lists of episode positions.

    fps: rows a second. state_convention: None where states are no poses.
    """

    root: Path
    format: str
    fps: float
    robot: str
    cameras: tuple[str, ...]
    convention: ActionConvention
    sources: list[Source]
    state_convention: StateConvention | None = None
    state_names: tuple[str, ...] = ()
    action_names: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    splits: dict[str, list[int]] = field(default_factory=dict)


def assemble(survey: Survey, skipped: Mapping[int, str] | None = None) -> Dataset:
    """A dataset of a survey's episodes, less those `skipped` (position -> reason), renumbered without gaps."""
    left_out = dict(skipped or {})
    kept = [source for source in survey.sources if source.index not in left_out]
    return Dataset(
        survey.root,
        fps=survey.fps,
        robot=survey.robot,
        cameras=survey.cameras,
        action_convention=survey.convention,
        state_convention=survey.state_convention,
        meta=survey.meta,
        lengths=[source.length or 0 for source in kept],
        tasks=[source.task for source in kept],
        state_names=survey.state_names,
        action_names=survey.action_names,
        load=_Loader(kept, survey.fps, survey.cameras).load,
        skipped=tuple(left_out.items()),
        format=survey.format,
    )


@dataclass(frozen=True)
class _Loader:
    sources: Sequence[Source]
    fps: float
    cameras: tuple[str, ...]

    def load(self, index: int) -> Episode:
        """One episode. Raises SimForcingError, naming it, for whatever is wrong with its numbers."""
        source, problems = self.sources[index], Problems(strict=True)
        rows = source.read(problems)
        length = check_rows(source, rows, problems)
        check_counts(source, length, problems)
        assert rows.state is not None and rows.action is not None
        times = np.arange(length) / self.fps if rows.timestamps is None else rows.timestamps
        return Episode(
            index=index,
            fps=self.fps,
            task=rows.tasks[0] if rows.tasks else source.task,
            cameras=self.cameras,
            state=rows.state,
            action=rows.action,
            timestamps=times - times[0],
            where=source.where,
            decode=source.decode,
        )


def check_rows(source: Source, rows: Rows, problems: Problems) -> int:
    """Compares an episode's numbers with each other and with its stated length; returns the number of rows.

    Reports `no_state`, `no_action`, `length_mismatch` and `not_finite` errors.
    """
    where, lengths = source.where, {}
    for name, values in (("state", rows.state), ("action", rows.action)):
        if values is None:
            problems.error(
                f"no_{name}",
                f"{where}: no {name} in {source.file}; it is needed, re-export with it or leave the episode out",
                episode=source.index,
                file=source.file,
            )
            continue
        lengths[name] = len(values)
        if not np.isfinite(values).all():
            bad = sorted({int(i) for i in np.argwhere(~np.isfinite(values))[:, 0]})
            full = "observation.state" if name == "state" else name
            problems.error(
                "not_finite",
                f"{where}: {full} has values that are missing or not finite (row {bad[0]}, {len(bad)} rows in all); "
                f"repair {source.file}",
                episode=source.index,
                file=source.file,
            )
    if rows.timestamps is not None:
        lengths["timestamp"] = len(rows.timestamps)
    if source.length is not None:
        lengths["stated length"] = source.length
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {count}" for name, count in lengths.items())
        problems.error(
            "length_mismatch",
            f"{where}: lengths disagree ({found}) in {source.file}; re-export",
            episode=source.index,
            file=source.file,
        )
    length = next(iter(lengths.values()), 0)
    if length == 0:
        problems.error(
            "length_mismatch",
            f"{where}: no rows in {source.file}; re-export",
            episode=source.index,
            file=source.file,
        )
    return length


def check_counts(source: Source, length: int, problems: Problems) -> None:
    """Compares the number of rows with the frames that the cameras' files say they have (headers only)."""
    for camera, footage in source.footage.items():
        try:
            count = footage.count()
        except SimForcingError:
            if problems.strict:
                raise
            continue  # reported where the file itself is looked at
        if count is not None and count != length:
            problems.error(
                "length_mismatch",
                f"{source.where}: {length} rows but {count} frames of {camera} in {footage.path}; "
                "re-export, or --skip-bad",
                episode=source.index,
                file=footage.path,
            )
