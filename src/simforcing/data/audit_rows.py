"""Checks of an audit that look at the numbers: lengths, values, angles, timestamps, duplicates, statistics.

Shapes: N rows of an episode, D width of a vector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from simforcing.data.problems import Problems, listed
from simforcing.data.source import Rows, Source, Survey, check_rows
from simforcing.data.stats import CONSTANT_RANGE
from simforcing.errors import SimForcingError

JITTER = 0.1
"""A timestamp may differ by this part of a frame from where its row belongs."""

CLIP_RUNS, CLIP_DISTINCT = 3, 20
"""An extreme value counts as a limit if it is met in this many separate places, by a dimension of so many values."""

_ANGLES = ("roll", "pitch", "yaw")


@dataclass(frozen=True)
class Episode:
    """What the checks of several episodes at once need of one; values without a finite number are left out."""

    source: Source
    rows: Rows
    length: int

    def values(self, name: str) -> Float[np.ndarray, "N D"] | None:
        """State or action, if every number is finite."""
        found = self.rows.state if name == "state" else self.rows.action
        return found if found is not None and found.size and np.isfinite(found).all() else None


def read_episodes(survey: Survey, problems: Problems) -> list[Episode]:
    """Reads and checks every episode's numbers; what cannot be read is reported and has no rows."""
    bad_tables = {f.episode for f in problems.findings if f.kind in ("missing_table", "unreadable_table")}
    found = []
    for source in survey.sources:
        if not source.task:
            message = f"{source.where}: the instruction is empty"
            problems.warn("empty_instruction", message, episode=source.index, file=source.file)
        if source.index in bad_tables:
            found.append(Episode(source, Rows(), source.length or 0))
            continue
        said = len(problems.findings)
        try:
            rows = source.read(problems)
        except SimForcingError as error:
            problems.error("unreadable_table", f"{source.where}: {error}", episode=source.index, file=source.file)
            found.append(Episode(source, Rows(), source.length or 0))
            continue
        nothing = rows.state is None and rows.action is None and rows.timestamps is None
        length = 0 if nothing and len(problems.findings) > said else check_rows(source, rows, problems)
        _check_timestamps(source, rows, survey.fps, problems)
        found.append(Episode(source, rows, length))
    return found


def _check_timestamps(source: Source, rows: Rows, fps: float, problems: Problems) -> None:
    """Timestamps that are not finite, go back, repeat or stray from the rate."""
    times = rows.timestamps
    if times is None or len(times) < 2:
        return
    index, file = source.index, source.file
    if not np.isfinite(times).all():
        message = f"{source.where}: timestamps are not finite; repair {file}"
        problems.error("not_finite", message, episode=index, file=file)
        return
    steps = np.diff(times)
    stuck = np.flatnonzero(steps <= 1e-3 / fps)
    if len(stuck):
        kind = "repeat" if (steps[stuck] > -1e-3 / fps).all() else "go back"
        message = f"{source.where}: timestamps {kind} at rows {listed(stuck + 1)} of {source.file}"
        problems.warn("timestamp_repeat", message, episode=index, file=file)
    late = np.abs((times - times[0]) * fps - np.arange(len(times)))
    if late.max() > JITTER:
        message = (
            f"{source.where}: timestamps stray by up to {late.max():.2f} frames from {fps:g} rows a second "
            f"(row {int(late.argmax())})"
        )
        problems.warn("timestamp_jitter", message, episode=index, file=file)


def measured_rate(episodes: Iterable[Episode]) -> float | None:
    """Rows a second by the timestamps (median step); None where no episode has any."""
    steps = [np.diff(e.rows.timestamps) for e in episodes if e.rows.timestamps is not None and e.length > 1]
    middle = float(np.median(np.concatenate(steps))) if steps else 0.0
    return 1.0 / middle if middle > 0 else None


def check_values(survey: Survey, episodes: Sequence[Episode], problems: Problems) -> None:
    """Constant dimensions, clipped values and wrapped angles of states and actions."""
    for name in ("state", "action"):
        names = survey.state_names if name == "state" else survey.action_names
        have = [(e, values) for e in episodes if (values := e.values(name)) is not None]
        widths = {values.shape[1] for _, values in have}
        if len(widths) > 1:
            problems.error("length_mismatch", f"{survey.root}: {name} has {listed(sorted(widths))} numbers a row")
        if len(widths) != 1:
            continue
        width = widths.pop()
        labels = names if len(names) == width else tuple(str(i) for i in range(width))
        if names and len(names) != width:
            message = f"{survey.root}: {name} has {width} numbers a row but {len(names)} names"
            problems.warn("contradicting_metadata", message)
        _check_constant(survey, name, labels, have, problems)
        _check_clipped(survey, name, labels, [values for _, values in have], problems)
        if name == "state" or survey.convention.kind == "absolute":
            convention = survey.state_convention if name == "state" else survey.convention
            rotvec = convention is not None and convention.rotation == "rotvec" and {"rx", "ry", "rz"} <= set(labels)
            for episode, values in have:
                _check_wraps(episode, name, labels, values, rotvec, problems)


def _check_constant(
    survey: Survey,
    name: str,
    labels: Sequence[str],
    have: Sequence[tuple[Episode, Float[np.ndarray, "N D"]]],
    problems: Problems,
) -> None:
    every = np.concatenate([values for _, values in have])
    always = np.ptp(every, axis=0) < CONSTANT_RANGE
    if len(every) > 1 and always.any():
        dims = ", ".join(labels[int(i)] for i in np.flatnonzero(always))
        message = f"{survey.root}: {name} {dims} never changes; it is shifted, not scaled, by the normaliser"
        problems.warn("constant_dimension", message)
    for episode, values in have:
        still = (np.ptp(values, axis=0) < CONSTANT_RANGE) & ~always
        if len(values) > 1 and still.any():
            dims = ", ".join(labels[int(i)] for i in np.flatnonzero(still))
            message = f"{episode.source.where}: {name} {dims} never changes in this episode"
            problems.note("constant_dimension", message, episode=episode.source.index, file=episode.source.file)


def _check_clipped(
    survey: Survey, name: str, labels: Sequence[str], parts: Sequence[Float[np.ndarray, "N D"]], problems: Problems
) -> None:
    """A limit is an extreme that is met exactly, in several places, and much more often than other values are.

    Or one that is met at both ends; or the largest magnitude of another dimension with such a limit. The gripper is
    left out: it has ends that it is meant to reach.
    """
    every = np.concatenate(parts)
    firsts = np.zeros(len(every), bool)  # first row of each episode
    firsts[np.cumsum([0, *map(len, parts[:-1])])] = True
    limits: dict[int, set[float]] = {}
    for i, label in enumerate(labels):
        values = every[:, i]
        if any(word in label.lower() for word in ("gripper", "finger")) or len(np.unique(values)) < CLIP_DISTINCT:
            continue
        low, high = float(values.min()), float(values.max())
        limits[i] = {limit for limit in (low, high) if _is_limit(values, limit, firsts)}
        if low == -high and np.isin(values, (low, high)).sum() >= CLIP_RUNS:
            limits[i] = {low, high}
    known = {abs(limit) for found in limits.values() for limit in found}
    for i, found in limits.items():
        values = every[:, i]
        found |= {float(limit) for limit in (values.min(), values.max()) if abs(float(limit)) in known}
        if found:
            counts = " and ".join(f"{limit:.4g} ({int((values == limit).sum())} times)" for limit in sorted(found))
            problems.warn("clipped", f"{survey.root}: {name} {labels[i]} is cut off at {counts}")


def _is_limit(values: Float[np.ndarray, "N"], limit: float, firsts: np.ndarray) -> bool:
    at = values == limit
    begins = at & (firsts | np.concatenate([[True], ~at[:-1]]))
    _, counts = np.unique(values[~at], return_counts=True)
    usual = float(np.quantile(counts, 0.99)) if len(counts) else 0.0
    return bool(limit != 0 and begins.sum() >= CLIP_RUNS and at.sum() > 2 * usual)


def wraps(values: Float[np.ndarray, "N D"], angle: Sequence[bool]) -> dict[int, list[int]]:
    """Rows, by column, at which an angle jumps by a full turn.

    A column known as an `angle` wraps where it jumps by more than half a turn, any other only where it jumps by nearly
    a full one, from one end of [-pi, pi] to the other.
    """
    found = {}
    for i in range(values.shape[1]):
        column = values[:, i].astype(np.float64)
        jumps = np.abs(np.diff(column))
        least = np.pi if angle[i] else 1.6 * np.pi
        ends = (np.abs(column) <= np.pi + 0.05) & (np.abs(column) >= 0.3 * np.pi)
        crosses = np.sign(column[:-1]) != np.sign(column[1:])
        if angle[i]:
            at = jumps > least
        else:
            at = (jumps > least) & (jumps < 2.05 * np.pi) & ends[:-1] & ends[1:] & crosses
        if at.any():
            found[i] = (np.flatnonzero(at) + 1).tolist()
    return found


def _check_wraps(
    episode: Episode,
    name: str,
    labels: Sequence[str],
    values: Float[np.ndarray, "N D"],
    rotvec: bool,
    problems: Problems,
) -> None:
    where = episode.source.where
    angle = [any(word in label.lower() for word in _ANGLES) and label[:1] != "k" for label in labels]
    for i, at in wraps(values, angle).items():
        message = f"{where}: {name} {labels[i]} wraps by a full turn at rows {listed(at)}"
        problems.warn("angle_wrap", message, episode=episode.source.index, file=episode.source.file)
    if rotvec:
        turns = values[:, [labels.index(axis) for axis in ("rx", "ry", "rz")]]
        size = np.linalg.norm(turns, axis=1)
        jump = np.linalg.norm(np.diff(turns, axis=0), axis=1)
        over = np.flatnonzero((jump > np.pi) & (size[1:] > np.pi / 2) & (size[:-1] > np.pi / 2)) + 1
        if len(over):
            message = f"{where}: {name} rotation vector turns over at rows {listed(over)}"
            problems.warn("angle_wrap", message, episode=episode.source.index, file=episode.source.file)


def check_duplicates(survey: Survey, episodes: Sequence[Episode], problems: Problems) -> None:
    """Episodes with the same numbers, and episodes that two splits share: by position or by content."""
    part = {index: name for name, positions in survey.splits.items() for index in positions}
    names = sorted(survey.splits)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            both = sorted(set(survey.splits[first]) & set(survey.splits[second]))
            for index in both:
                message = f"episode {index} of {survey.root}: is both in split {first!r} and in {second!r}"
                problems.error("split_overlap", message, episode=index)
    seen: dict[str, Episode] = {}
    for episode in episodes:
        digest = _digest(episode)
        if digest is None:
            continue
        earlier = seen.setdefault(digest, episode)
        if earlier is episode:
            continue
        here, there = episode.source, earlier.source
        if part.get(here.index) != part.get(there.index):
            message = (
                f"{here.where}: in split {part.get(here.index)!r}, has the same numbers as episode {there.index} in "
                f"split {part.get(there.index)!r}; a result on it would be on training data"
            )
            problems.error("split_overlap", message, episode=here.index, file=here.file)
        else:
            message = f"{here.where}: has the same numbers as episode {there.index} ({there.file})"
            problems.warn("duplicate_episode", message, episode=here.index, file=here.file)


def _digest(episode: Episode) -> str | None:
    """What an episode's numbers are, if they change at all."""
    parts = [values for values in (episode.values("state"), episode.values("action")) if values is not None]
    if not parts or len(parts[0]) < 2 or not any(np.ptp(values, axis=0).any() for values in parts):
        return None
    digest = hashlib.sha256()
    for values in parts:
        digest.update(np.ascontiguousarray(values, np.float32).tobytes())
    return digest.hexdigest()


def check_stats(survey: Survey, stats: Mapping[str, object], episodes: Sequence[Episode], problems: Problems) -> None:
    """Compares stored statistics (`{feature: {min, max, ...}}`) with the data, if every episode could be read."""
    for feature, name in (("observation.state", "state"), ("action", "action")):
        entry = stats.get(feature)
        have = [episode.values(name) for episode in episodes]
        if not isinstance(entry, dict) or any(values is None for values in have):
            continue
        every = np.concatenate([values for values in have if values is not None])
        for bound, found in (("min", every.min(axis=0)), ("max", every.max(axis=0))):
            stored = np.ravel(np.asarray(entry.get(bound, []), np.float64))
            if stored.size and (stored.shape != found.shape or not np.allclose(stored, found, rtol=1e-3, atol=1e-3)):
                message = (
                    f"{survey.root / 'meta/stats.json'}: {bound} of {feature} is not that of the data; compute it anew"
                )
                problems.warn("contradicting_metadata", message, file=survey.root / "meta/stats.json")
                break
