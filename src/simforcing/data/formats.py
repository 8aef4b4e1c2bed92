"""Which format a dataset has, and the one way to open all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from simforcing.data import lerobot_format as layout
from simforcing.data.bridge_npz import is_bridge_npz, survey_bridge_npz
from simforcing.data.droid_json import is_droid_json, survey_droid_json
from simforcing.data.episode import Dataset
from simforcing.data.lerobot import survey_lerobot
from simforcing.data.paired_mp4 import is_paired_mp4, survey_paired_mp4
from simforcing.data.problems import Problems
from simforcing.data.rlds import is_rlds, survey_rlds
from simforcing.data.source import Survey, assemble
from simforcing.errors import SimForcingError

FORMATS: tuple[tuple[Callable[[Path], bool], Callable[[Path, Problems], Survey]], ...] = (
    (lambda root: (root / layout.INFO).exists(), survey_lerobot),
    (is_paired_mp4, survey_paired_mp4),
    (is_rlds, survey_rlds),
    (is_droid_json, survey_droid_json),
    (is_bridge_npz, survey_bridge_npz),
)
"""How each format is recognised and read, in the order in which they are tried."""

KNOWN = "LeRobot v2 and v3, RLDS tfrecords, DROID JSON, npz + mp4, the paired [sim|real] layout"

_VIDEOS = {".mp4", ".avi", ".mkv", ".mov", ".webm"}


def survey(path: Path | str, problems: Problems) -> Survey:
    """What a dataset of any known format says of itself. Raises SimForcingError if it has none, or no episode."""
    root = Path(path)
    if not root.exists():
        raise SimForcingError(f"{root}: no such directory; give the dataset's own directory")
    if not root.is_dir():
        raise SimForcingError(f"{root}: is a file; give the dataset's own directory")
    for recognise, read in FORMATS:
        if recognise(root):
            found = read(root, problems)
            if not found.sources:
                raise SimForcingError(f"{root}: no episode in it; download or re-export the dataset")
            return found
    raise SimForcingError(_unknown(root))


def _unknown(root: Path) -> str:
    if (root / "meta").is_dir():
        return (
            f"{root}: not a LeRobot dataset (no {layout.INFO}), nor another known one ({KNOWN}); restore its metadata"
        )
    videos = sorted(path.name for path in root.iterdir() if path.suffix.lower() in _VIDEOS)
    if videos:
        return (
            f"{root}: {len(videos)} videos ({videos[0]} ...) without actions or states; a dataset needs both, "
            f"known formats are {KNOWN}"
        )
    inside = sorted(path.name for path in root.iterdir() if path.is_dir() and _any_format(path))
    hint = f"; did you mean {root / inside[0]}?" if inside else f"; known formats are {KNOWN}"
    return f"{root}: not a LeRobot dataset (no {layout.INFO}), nor another known one{hint}"


def _any_format(root: Path) -> bool:
    return any(recognise(root) for recognise, _ in FORMATS)


def open_dataset(path: Path | str) -> Dataset:
    """Open a dataset directory of any known format; rows and pictures are read when asked for.

    Raises SimForcingError, with the file and a remedy, if it cannot, or at the first error in its metadata; an
    episode raises the errors of its own numbers and pictures when it is used. See `audit.open_checked` for leaving
    bad ones out.
    """
    return assemble(survey(path, Problems(strict=True)))
