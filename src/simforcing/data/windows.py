"""Which frames, actions and states make one training or evaluation clip.

Shapes: T frames of a clip, A actions of a clip, D action or state width, h w stored size, H W clip size.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int64, UInt8
from PIL import Image

from simforcing.data.episode import Episode
from simforcing.errors import SimForcingError
from simforcing.files import write_text


@dataclass(frozen=True)
class ClipRule:
    """How a clip is cut from an episode: every `stride`-th frame as a picture, every step as an action.

    A window has `steps` = (frames - 1) * stride + 1 rows. Pictures are taken at start, start + stride, ...;
    actions at start .. start + `actions` - 1, so that action i leads row i to row i + 1. The released Bridge
    setting is frames=21, stride=1; InternData-A1 is frames=33, stride=4 with all 128 actions.
    """

    frames: int = 13
    stride: int = 1
    height: int = 64
    width: int = 64

    def __post_init__(self) -> None:
        for name in ("frames", "stride", "height", "width"):
            if getattr(self, name) < 1:
                raise SimForcingError(f"clip rule: {name} is {getattr(self, name)}; give a number of at least 1")

    @property
    def actions(self) -> int:
        """Number of actions of a clip."""
        return (self.frames - 1) * self.stride

    @property
    def steps(self) -> int:
        """Number of episode rows that a clip spans."""
        return self.actions + 1


@dataclass
class Clip:
    """One window of one episode, cut and resized, values as stored (nothing normalised)."""

    episode: int
    start: int
    task: str
    frames: dict[str, UInt8[np.ndarray, "T H W 3"]]
    action: Float32[np.ndarray, "A D"]
    proprio: Float32[np.ndarray, "D"]


def starts(length: int, rule: ClipRule, every: int = 1) -> list[int]:
    """First rows of all windows that fit in an episode of `length` rows, `every` rows apart (empty if none
    fits).
    """
    if every < 1:
        raise SimForcingError(f"window starts: every is {every}; give a number of at least 1")
    return list(range(0, length - rule.steps + 1, every))


def resize_crop(frames: UInt8[np.ndarray, "T h w 3"], height: int, width: int) -> UInt8[np.ndarray, "T H W 3"]:
    """Resize so that both sides cover the target, then crop its centre (the released preprocessing).

    scale = max(height / h, width / w), size int(x * scale + 0.5), bicubic with antialiasing on uint8
    (Pillow). Of an odd surplus the crop leaves round(surplus / 2) rows above, as torchvision does. Frames
    that have the right size already are returned unchanged. Raises SimForcingError if the input is not uint8
    [T, h, w, 3].
    """
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        raise SimForcingError(f"resize: got {frames.dtype} {list(frames.shape)}; give uint8 frames [T, h, w, 3]")
    old_height, old_width = frames.shape[1:3]
    if (old_height, old_width) == (height, width):
        return frames
    scale = max(height / old_height, width / old_width)
    size = (max(int(old_width * scale + 0.5), width), max(int(old_height * scale + 0.5), height))
    left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
    out = np.empty((len(frames), height, width, 3), np.uint8)
    for i, frame in enumerate(frames):
        resized = np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC))
        out[i] = resized[top : top + height, left : left + width]
    return out


def load_clip(episode: Episode, start: int, rule: ClipRule, cameras: Sequence[str]) -> Clip:
    """Cut the window that begins at row `start`; decodes only its frames.

    Raises SimForcingError if the window does not fit in the episode or a camera is unknown.
    """
    _check_window(episode, start, rule)
    rows = range(start, start + rule.steps, rule.stride)
    frames = {key: resize_crop(episode.frames(key, rows), rule.height, rule.width) for key in cameras}
    return _clip(episode, start, rule, frames)


def _check_window(episode: Episode, start: int, rule: ClipRule) -> None:
    last = episode.length - rule.steps
    if 0 <= start <= last:
        return
    remedy = f"starts 0 to {last} fit" if last >= 0 else "use a shorter clip rule or leave this episode out"
    raise SimForcingError(
        f"{episode.where}: a window of {rule.steps} rows from row {start} is outside its {episode.length} "
        f"rows; {remedy}"
    )


def _clip(episode: Episode, start: int, rule: ClipRule, frames: dict[str, UInt8[np.ndarray, "T H W 3"]]) -> Clip:
    return Clip(
        episode=episode.index,
        start=start,
        task=episode.task,
        frames=frames,
        action=episode.action[start : start + rule.actions].copy(),
        proprio=episode.state[start].copy(),
    )


def split_episodes(n: int, parts: Mapping[str, float | int | None], seed: int = 0) -> dict[str, list[int]]:
    """Divide episodes 0..n-1 into named, disjoint parts; the same arguments always give the same split.

    Args:
        n: number of episodes.
        parts: name -> count (int) or fraction of n (float), not mixed; one value may be None: all the rest.
            Fractions that sum to 1 and counts that sum to n cover every episode.
        seed: shuffles which episode goes where.

    Raises SimForcingError if the parts ask for more than n episodes, are negative or mix the two kinds.
    """
    given = {name: size for name, size in parts.items() if size is not None}
    if len(parts) - len(given) > 1:
        raise SimForcingError("split: more than one part takes the rest; give a size to all but one")
    if len({isinstance(size, float) for size in given.values()}) > 1:
        raise SimForcingError(f"split {dict(parts)}: counts and fractions are mixed; use one kind")
    if any(size < 0 for size in given.values()):
        raise SimForcingError(f"split {dict(parts)}: a size is negative")
    if any(isinstance(size, float) for size in given.values()):
        sizes = _fraction_sizes(n, {name: float(size) for name, size in given.items()})
    else:
        sizes = {name: int(size) for name, size in given.items()}
    if sum(sizes.values()) > n:
        raise SimForcingError(f"split {dict(parts)}: asks for {sum(sizes.values())} of {n} episodes; ask for fewer")
    rest = n - sum(sizes.values())
    order = np.random.default_rng(seed).permutation(n).tolist()
    split: dict[str, list[int]] = {}
    for name in parts:
        size = sizes.get(name, rest)
        split[name], order = sorted(order[:size]), order[size:]
    return split


def _fraction_sizes(n: int, fractions: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers closest to n * fraction whose sum is n * (sum of fractions), by largest remainder."""
    total = sum(fractions.values())
    if total > 1 + 1e-9:
        raise SimForcingError(f"split {dict(fractions)}: fractions sum to {total:g}; at most 1 is possible")
    sizes = {name: math.floor(n * share + 1e-9) for name, share in fractions.items()}
    spare = round(n * min(total, 1.0)) - sum(sizes.values())
    by_remainder = sorted(fractions, key=lambda name: n * fractions[name] - sizes[name], reverse=True)
    for name in by_remainder[: max(spare, 0)]:
        sizes[name] += 1
    return sizes


def save_split(path: Path, split: Mapping[str, Sequence[int]], source: str = "") -> None:
    """Write a split with the sha256 of its content; `source` says which dataset it divides. Replaces
    atomically. Raises SimForcingError if parts share an episode.
    """
    _check_disjoint(path, split)
    body = {"source": source, "episodes": {name: list(episodes) for name, episodes in split.items()}}
    write_text(path, json.dumps({"sha256": _digest(body), **body}, indent=1) + "\n")


def load_split(path: Path) -> dict[str, list[int]]:
    """Read what `save_split` wrote. Raises SimForcingError if missing, edited, or if parts share episodes."""
    try:
        stored = json.loads(path.read_text())
        split = {str(name): [int(i) for i in episodes] for name, episodes in stored["episodes"].items()}
        body = {"source": stored["source"], "episodes": split}
        digest = stored["sha256"]
    except FileNotFoundError:
        raise SimForcingError(f"{path}: no such split file; write one with 'simforcing encode'") from None
    except IsADirectoryError:
        raise SimForcingError(
            f"--split {path}: a directory; give the split file that 'simforcing encode' wrote, e.g. {path}/split.json"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SimForcingError(
            f"{path}: not a split file ({error}); give the split.json that 'simforcing encode' wrote"
        ) from error
    if digest != _digest(body):
        raise SimForcingError(
            f"{path}: content does not match its sha256; it was edited; make it anew with 'simforcing encode'"
        )
    _check_disjoint(path, split)
    return split


def _check_disjoint(path: Path, split: Mapping[str, Sequence[int]]) -> None:
    every = [episode for episodes in split.values() for episode in episodes]
    if len(every) != len(set(every)):
        raise SimForcingError(f"{path}: an episode is in two parts; make it anew with 'simforcing encode'")


def split_source(path: Path) -> str:
    """Which dataset a split divides: what `save_split` was given, "" for nothing. Raises as `load_split` does."""
    load_split(path)
    return str(json.loads(path.read_text())["source"])


def other_episodes(episode: Int64[np.ndarray, "N"]) -> Int64[np.ndarray, "N"]:
    """A permutation of N clips that gives each a clip of another episode: whose actions are exchanged with whose.

    Where one episode has more than half of the clips this is possible for only some of them; the others, as few as can
    be, get another clip of their own episode (a single clip gets itself).
    """
    count = len(episode)
    order = np.argsort(episode, kind="stable")
    largest = int(np.unique(episode, return_counts=True)[1].max(initial=0))
    result = np.empty(count, np.int64)
    result[order] = np.roll(order, -(largest if largest < count else count // 2))
    return result


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
