"""Datasets of robot episodes: readers, the paired-dataset writer, clips, statistics, caches."""

from pathlib import Path

from simforcing.data.episode import REAL, SIM, ActionConvention, Dataset, Episode
from simforcing.data.lerobot import LeRobotWriter, open_lerobot
from simforcing.errors import SimForcingError

__all__ = ["REAL", "SIM", "ActionConvention", "Dataset", "Episode", "LeRobotWriter", "open_dataset"]


def open_dataset(path: Path | str) -> Dataset:
    """Open a dataset directory (LeRobot v3.0). Raises SimForcingError with the file and a remedy if it
    cannot.
    """
    root = Path(path)
    if not root.exists():
        raise SimForcingError(f"{root}: no such directory; give the dataset's own directory")
    if not root.is_dir():
        raise SimForcingError(f"{root}: is a file; give the dataset's own directory")
    return open_lerobot(root)
