"""Datasets of robot episodes: readers of every format, the writer, clips, statistics, audit, caches."""

from simforcing.data.episode import REAL, SIM, ActionConvention, Dataset, Episode, StateConvention
from simforcing.data.formats import open_dataset
from simforcing.data.lerobot import LeRobotWriter

__all__ = ["REAL", "SIM", "ActionConvention", "Dataset", "Episode", "LeRobotWriter", "StateConvention", "open_dataset"]
