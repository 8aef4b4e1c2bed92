"""Small synthetic datasets: smooth pictures, so that lossy video keeps them well above the tested bound."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from simforcing.data import REAL, SIM, LeRobotWriter

settings.register_profile("simforcing", deadline=None)  # a busy machine is no failure
settings.load_profile("simforcing")

NAMES = ("x", "y", "z", "rx", "ry", "rz", "gripper")


def smooth_frames(count: int, height: int, width: int, phase: float = 0.0) -> np.ndarray:
    """uint8 [count, height, width, 3] of slowly moving gradients."""
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    frames = [
        np.stack(
            [
                127 + 90 * np.sin(3 * x + 0.2 * i + phase),
                127 + 80 * np.cos(2 * y - 0.15 * i + phase),
                40 + 150 * x * y + 2 * (i % 20),
            ],
            axis=-1,
        )
        for i in range(count)
    ]
    return np.array(frames).astype(np.uint8)


def rows(count: int, seed: int) -> np.ndarray:
    """float32 [count, 7] of random numbers."""
    return np.random.default_rng(seed).normal(size=(count, len(NAMES))).astype(np.float32)


@pytest.fixture(scope="session")
def frames() -> Callable[..., np.ndarray]:
    return smooth_frames


@pytest.fixture(scope="session")
def vectors() -> Callable[[int, int], np.ndarray]:
    return rows


def make_writer(out: Path, **changes: object) -> LeRobotWriter:
    arguments: dict[str, object] = {
        "fps": 5.0,
        "robot": "widowx250s",
        "cameras": {REAL: (32, 48), SIM: (32, 48)},
        "state_names": NAMES,
        "action_names": NAMES,
    }
    return LeRobotWriter(out, **(arguments | changes))  # type: ignore[arg-type]


def make_dataset(out: Path, lengths: Sequence[int] = (20, 9, 14), **changes: object) -> Path:
    with make_writer(out, **changes) as writer:
        for k, length in enumerate(lengths):
            pictures = {REAL: smooth_frames(length, 32, 48, k), SIM: smooth_frames(length, 32, 48, k + 0.5)}
            writer.add_episode(pictures, rows(length, k), rows(length, 100 + k), f"task {k % 2}")
    return out


@pytest.fixture(scope="session")
def new_writer() -> Callable[..., LeRobotWriter]:
    """Makes a writer of paired 32x48 pictures at 5 Hz; keywords replace its arguments."""
    return make_writer


@pytest.fixture(scope="session")
def write_dataset() -> Callable[..., Path]:
    """Writes a dataset of episodes of the given lengths; episode k has task `task k % 2`."""
    return make_dataset


@pytest.fixture(scope="session")
def dataset_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One dataset of 20, 9 and 14 frames that all tests read and none changes."""
    return make_dataset(tmp_path_factory.mktemp("dataset") / "d")
