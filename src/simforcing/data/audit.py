"""What a dataset is and what is wrong with it, per episode and file; and opening one only if it is sound.

Reading is tolerant: whatever can be read is looked at, and everything that is wrong is found in one pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from simforcing.data import lerobot_format as layout
from simforcing.data.audit_lag import Lag, estimate, speed
from simforcing.data.audit_rows import (
    Episode,
    check_duplicates,
    check_stats,
    check_values,
    measured_rate,
    read_episodes,
)
from simforcing.data.audit_video import Look, check_headers, check_looks, look
from simforcing.data.episode import Dataset
from simforcing.data.formats import survey
from simforcing.data.lerobot_tables import read_json, read_table
from simforcing.data.problems import Finding, Problems
from simforcing.data.source import Survey, VideoFootage, assemble, check_counts
from simforcing.data.windows import ClipRule, starts
from simforcing.errors import SimForcingError

CLIP_RULES: dict[str, ClipRule] = {
    "bridge": ClipRule(frames=21, stride=1, height=224, width=320),
    "interndata_a1": ClipRule(frames=33, stride=4, height=224, width=320),
    "demo": ClipRule(frames=13, stride=1, height=64, width=64),
}
"""Named clip rules: the two of the paper, and the bundled demo's."""

Report = Callable[[str, int, int], None]
"""Called with a stage (`rows`, `video`), how many are done, and of how many."""

LAG_FINDING = 0.75
"""Frames of lag from which it is worth a finding."""


@dataclass
class Audit:
    """Result of an audit. fps: rows a second as stated; fps_measured: by timestamps, or by the video files' headers.

    windows: clip rule -> number of windows and of episodes that have any, counting episodes without errors. lag: how
    many frames each camera, and the state, comes after the action. pictures: camera -> height, width, codec.
    """

    root: Path
    format: str
    robot: str
    cameras: tuple[str, ...]
    fps: float
    fps_measured: float | None
    lengths: list[int]
    action: dict[str, Any]
    splits: dict[str, int]
    windows: dict[str, dict[str, int]]
    pictures: dict[str, dict[str, Any]]
    lag: dict[str, Lag]
    findings: list[Finding] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 clean, 1 with findings of any severity."""
        return 1 if self.findings else 0

    def kinds(self, severity: str | None = None) -> Counter[str]:
        """How many findings there are of each kind."""
        return Counter(f.kind for f in self.findings if severity in (None, f.severity))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "path": str(self.root),
            "format": self.format,
            "robot": self.robot,
            "cameras": {key: self.pictures.get(key, {}) for key in self.cameras},
            "fps": self.fps,
            "fps_measured": self.fps_measured,
            "episodes": len(self.lengths),
            "frames": sum(self.lengths),
            "lengths": self.lengths,
            "action": self.action,
            "splits": self.splits,
            "windows": self.windows,
            "lag_frames": {
                key: {"frames": round(lag.frames, 2), "correlation": round(lag.correlation, 3)}
                for key, lag in self.lag.items()
            },
            "findings": [finding.to_dict(self.root) for finding in self.findings],
            "exit_code": self.exit_code,
        }


def audit(path: Path | str, *, video: bool = True, report: Report | None = None) -> Audit:
    """Look at everything in a dataset. video: also decode every picture (else only the headers of the files).

    Raises SimForcingError if the dataset cannot be read at all: no known format, or no metadata to begin with.
    """
    tell = report or (lambda stage, done, total: None)
    problems = Problems(strict=False)
    found = survey(path, problems)
    episodes = read_episodes(found, problems)
    tell("rows", len(episodes), len(episodes))
    check_values(found, episodes, problems)
    check_duplicates(found, episodes, problems)
    _check_lerobot(found, episodes, problems)
    for episode in episodes:
        if episode.length:
            check_counts(episode.source, episode.length, problems)
    looks: list[Look] = []
    if video:
        looks = list(look(found.sources, found.fps, problems, lambda done, total: tell("video", done, total)))
        for each in looks:
            check_looks(each, _moving(episodes[each.source.index], found), problems)
    else:
        check_headers(found.sources, found.fps, problems)
    lag = _lags(found, episodes, looks)
    _note_lags(found, lag, problems)
    bad = problems.bad()
    lengths = [episode.length for episode in episodes]
    sound = [episode.length for episode in episodes if episode.source.index not in bad and episode.length]
    return Audit(
        root=found.root,
        format=found.format,
        robot=found.robot,
        cameras=found.cameras,
        fps=found.fps,
        fps_measured=measured_rate(episodes) or _container_rate(found),
        lengths=lengths,
        action=found.convention.to_dict(),
        splits={name: len(positions) for name, positions in found.splits.items()},
        windows={name: _windows(sound, rule) for name, rule in CLIP_RULES.items()},
        pictures=_pictures(found, looks, problems),
        lag=lag,
        findings=problems.ordered(),
    )


def _windows(lengths: Iterable[int], rule: ClipRule) -> dict[str, int]:
    counts = [len(starts(length, rule)) for length in lengths]
    return {"windows": sum(counts), "episodes": sum(count > 0 for count in counts)}


def _moving(episode: Episode, found: Survey) -> Bool[np.ndarray, "M"] | None:
    """Whether the robot moves in each transition between rows: by its state, else by its actions."""
    state, action = episode.values("state"), episode.values("action")
    if state is not None:
        span = np.ptp(state, axis=0)
        step = np.abs(np.diff(state, axis=0)) / np.where(span > 1e-3, span, np.inf)
        return np.asarray((step > 0.01).any(axis=1))
    if action is None:
        return None
    amount = speed(action, found.convention.kind)
    return np.asarray(amount > 0.1 * max(float(amount.max(initial=0.0)), 1e-9))


def _lags(found: Survey, episodes: Sequence[Episode], looks: Sequence[Look]) -> dict[str, Lag]:
    told = {
        episode.source.index: speed(action, found.convention.kind)
        for episode in episodes
        if (action := episode.values("action")) is not None and len(action) > 1
    }
    series: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for each in looks:
        if each.looks is not None and each.source.index in told:
            series.setdefault(each.camera, []).append((told[each.source.index], each.looks.change[1:]))
    for episode in episodes:
        state = episode.values("state")
        if state is not None and found.state_convention is not None and episode.source.index in told:
            moved = speed(state, "absolute", gripper=2 if found.state_convention.fingers else 1)
            series.setdefault("state", []).append((told[episode.source.index], moved))
    lags = {key: estimate(pairs) for key, pairs in series.items()}
    return {key: lag for key, lag in lags.items() if lag is not None}


def _note_lags(found: Survey, lags: dict[str, Lag], problems: Problems) -> None:
    for key, lag in lags.items():
        if abs(lag.frames) >= LAG_FINDING and key != "state":
            side = "after" if lag.frames > 0 else "before"
            usual = "; targets reached at the next row give 1" if found.convention.kind == "absolute" else ""
            problems.note(
                "image_lag",
                f"{found.root}: pictures of {key} change {abs(lag.frames):.1f} frames {side} the action that is "
                f"recorded with them ({1000 * abs(lag.frames) / found.fps:.0f} ms, "
                f"correlation {lag.correlation:.2f}{usual})",
            )


def _container_rate(found: Survey) -> float | None:
    """Median rate by the headers of the video files that can be read."""
    rates = []
    for source in found.sources:
        for footage in source.footage.values():
            if isinstance(footage, VideoFootage) and footage.file.fault() is None:
                try:
                    rates.append(footage.file.probe().fps)
                except SimForcingError:
                    continue  # reported where its pictures are looked at
    return float(np.median(rates)) if rates else None


def _pictures(found: Survey, looks: Sequence[Look], problems: Problems) -> dict[str, dict[str, Any]]:
    """Size and codec of each camera; sizes that differ, or are odd, are reported."""
    sizes: dict[str, Counter[tuple[int, int]]] = {}
    codecs: dict[str, str] = {}
    for each in looks:
        if each.looks is None:
            continue
        sizes.setdefault(each.camera, Counter())[each.looks.size] += 1
        footage = each.source.footage[each.camera]
        if isinstance(footage, VideoFootage):
            codecs[each.camera] = footage.file.probe().codec
    for each in looks:
        usual = sizes[each.camera].most_common(1)[0][0] if each.camera in sizes else None
        if each.looks is not None and each.looks.size != usual:
            size, file = each.looks.size, each.source.footage[each.camera].path
            message = (
                f"{each.source.where}: {each.camera} is {size[0]}x{size[1]} in {file}, others are {usual[0]}x{usual[1]}"  # type: ignore[index]
            )
            problems.error("frame_size", message, episode=each.source.index, file=file)
    return {
        key: {"height": size[0], "width": size[1], "codec": codecs.get(key, "pictures")}
        for key, counts in sizes.items()
        for size in [counts.most_common(1)[0][0]]
    }


def _check_lerobot(found: Survey, episodes: Sequence[Episode], problems: Problems) -> None:
    """What only LeRobot's metadata can contradict: features and videos, statistics, tables beside the layout."""
    if not found.format.startswith("LeRobot"):
        return
    info = read_json(found.root / layout.INFO)
    where = found.root / layout.INFO
    for key in found.cameras:
        _check_feature(found, key, info["features"][key], where, problems)
    path = found.root / layout.STATS
    if path.is_file():
        try:
            check_stats(found, read_json(path), episodes, problems)
        except (SimForcingError, ValueError, TypeError) as error:
            problems.warn("contradicting_metadata", f"{path}: cannot be compared with the data ({error})", file=path)
    used = {source.file for source in found.sources} | set((found.root / layout.EPISODES_DIR).glob("chunk-*/*.parquet"))
    used.add(found.root / layout.TASKS)
    for stray in sorted(set(found.root.rglob("*.parquet")) - used):
        problems.warn("stray_file", f"{stray}: no metadata name this file; it is not read", file=stray)
        beside = Problems(strict=False)
        try:
            read_table(stray, (), beside)
        except SimForcingError as error:
            beside.error("unreadable_table", str(error))
        for finding in beside.findings:
            problems.warn(finding.kind, finding.message, file=stray)


def _check_feature(found: Survey, key: str, feature: dict[str, Any], where: Path, problems: Problems) -> None:
    """Size, codec and rate of a camera by `info.json`, and by the first of its videos that can be opened."""
    details = feature.get("info") or feature.get("video_info") or {}
    rate = details.get("video.fps")
    if isinstance(rate, (int, float)) and abs(rate - found.fps) > 0.02 * found.fps:
        message = f"{where}: fps is {found.fps:g} but video.fps of {key} {rate:g}"
        problems.warn("contradicting_metadata", message, file=where)
    for source in found.sources:
        footage = source.footage.get(key)
        if not isinstance(footage, VideoFootage) or footage.file.fault() is not None:
            continue
        try:
            probe = footage.file.probe()
        except SimForcingError:
            continue  # reported where its pictures are looked at
        stated = {int(n) for n in feature.get("shape") or [] if isinstance(n, int)} - {1, 3}
        if stated and stated != {probe.height, probe.width}:
            message = f"{where}: {key} has shape {feature['shape']}, its videos are {probe.height}x{probe.width}"
            problems.warn("contradicting_metadata", message, file=where)
        codec = details.get("video.codec")
        if codec and _plain(codec) != _plain(probe.codec):
            message = f"{where}: video.codec of {key} is {codec}, its videos are {probe.codec}"
            problems.warn("contradicting_metadata", message, file=where)
        return


def _plain(codec: str) -> str:
    """One name for the several names of a codec."""
    name = str(codec).lower().replace(".", "")
    known = {"h264": "h264", "avc": "h264", "avc1": "h264", "libx264": "h264", "av1": "av1", "libsvtav1": "av1"}
    known |= {"libdav1d": "av1", "av01": "av1", "hevc": "hevc", "h265": "hevc", "libx265": "hevc", "mp4v": "mpeg4"}
    return known.get(name, name)


def open_checked(
    path: Path | str, *, skip_bad: bool = False, video: bool = True, report: Report | None = None
) -> Dataset:
    """Open a dataset for training or pairing: audited first, and refused if it has errors.

    skip_bad: leave out the episodes with errors instead; `Dataset.skipped` lists them with reasons. An error that
    belongs to no episode is refused all the same. Raises SimForcingError with the first error and the number of all.
    """
    tolerant = Problems(strict=False)
    found = survey(path, tolerant)
    errors = [f for f in audit(path, video=video, report=report).findings if f.severity == "error"]
    bad = Problems(strict=False, findings=errors).bad()
    whole = [f for f in errors if f.episode is None]
    if errors and (not skip_bad or whole):
        first = whole[0] if whole else errors[0]
        more = f" ({len(errors)} errors in all; 'simforcing data audit' lists them" if len(errors) > 1 else " ("
        hint = "" if whole else f"{'; ' if len(errors) > 1 else ''}--skip-bad leaves {len(bad)} episodes out"
        raise SimForcingError(f"{first.message}{more}{hint})".replace(" ()", ""))
    if all(source.index in bad for source in found.sources):
        raise SimForcingError(
            f"{found.root}: all {len(bad)} episodes have errors; the first: {next(iter(bad.values()))}"
        )
    return assemble(found, bad)
