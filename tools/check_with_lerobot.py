"""Opens a LeRobot v3.0 dataset with LeRobot itself and compares what it reads with what we read.

LeRobot cannot share an environment with this project, so it gets its own, made once: some GB with its PyTorch. It needs
Python 3.12 (`--python`) and a package index.

    python tools/check_with_lerobot.py data/pairs --python python3.12 --venv ~/.cache/simforcing/lerobot

Exit code: 0 both read the same, 1 they differ, 2 LeRobot could not be installed or run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np

from simforcing.data import Dataset, open_dataset
from simforcing.errors import SimForcingError

REQUIREMENT = "lerobot[dataset]>=0.6,<0.7"

PICTURE_TOLERANCE = 2.0
"""Grey levels by which decoded pictures may differ on average: the two use different builds of FFmpeg."""

# Runs inside LeRobot's environment: dataset, output file, then row numbers.
READ = """
import sys
from importlib.metadata import version
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

root, out, *rows = sys.argv[1:]
data = LeRobotDataset("local/check", root=root, video_backend="pyav")
found = {"rows": len(data), "episodes": data.num_episodes, "fps": float(data.fps), "version": version("lerobot")}
found["cameras"] = np.array(sorted(data.meta.video_keys))
for row in map(int, rows):
    item = data[row]
    for key in ("observation.state", "action", "timestamp", "episode_index"):
        found[f"{row}/{key}"] = np.asarray(item[key])
    found[f"{row}/task"] = str(item["task"])
    for key in data.meta.video_keys:
        found[f"{row}/{key}"] = (np.asarray(item[key]) * 255).round().astype(np.uint8).transpose(1, 2, 0)
np.savez(out, **found)
"""


def environment(folder: Path, python: str) -> Path:
    """The interpreter of an environment that has LeRobot; made if it is not there."""
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        if shutil.which(python) is None:
            raise SimForcingError(f"{python}: no such interpreter; give one of Python 3.12 or newer with --python")
        print(f"making {folder}; this takes minutes and some GB", file=sys.stderr)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    known = subprocess.run([interpreter, "-c", "import lerobot, datasets, av"], capture_output=True, check=False)
    if known.returncode:
        subprocess.run([interpreter, "-m", "pip", "install", "--quiet", REQUIREMENT], check=True)
    return interpreter


def sampled(data: Dataset, count: int) -> list[int]:
    """Rows of the whole dataset to compare: first and last of every episode, and some between, spread over all."""
    ends = np.cumsum([0, *data.lengths])
    rows = {int(row) for first, last in pairwise(ends) for row in (first, (first + last) // 2, last - 1)}
    every = sorted(rows)
    return [every[i] for i in np.unique(np.linspace(0, len(every) - 1, min(count, len(every))).astype(int))]


def differences(data: Dataset, theirs: dict[str, np.ndarray], rows: list[int]) -> list[str]:
    """One line for everything that LeRobot reads otherwise than we do."""
    wrong = []
    for name, ours in (("rows", sum(data.lengths)), ("episodes", len(data)), ("fps", data.fps)):
        if float(theirs[name]) != ours:
            wrong.append(f"{name}: LeRobot {theirs[name]}, we {ours}")
    if sorted(data.cameras) != theirs["cameras"].tolist():
        wrong.append(f"cameras: LeRobot {theirs['cameras'].tolist()}, we {sorted(data.cameras)}")
    ends = np.cumsum(data.lengths)
    for row in rows:
        number = int(np.searchsorted(ends, row, side="right"))
        episode, local = data[number], row - int(ends[number] - data.lengths[number])
        for key, value in (("observation.state", episode.state[local]), ("action", episode.action[local])):
            if not np.array_equal(np.ravel(theirs[f"{row}/{key}"]), value):
                wrong.append(f"row {row}: {key} is {theirs[f'{row}/{key}'].tolist()}, ours {value.tolist()}")
        if int(theirs[f"{row}/episode_index"]) != number or str(theirs[f"{row}/task"]) != episode.task:
            wrong.append(
                f"row {row}: episode {theirs[f'{row}/episode_index']} {theirs[f'{row}/task']!r}, "
                f"ours {number} {episode.task!r}"
            )
        for key in data.cameras:
            ours, other = episode.frames(key, [local])[0], theirs[f"{row}/{key}"]
            if ours.shape != other.shape:
                wrong.append(f"row {row}: {key} is {other.shape}, ours {ours.shape}")
            elif (gap := float(np.abs(ours.astype(int) - other).mean())) > PICTURE_TOLERANCE:
                wrong.append(f"row {row}: {key} differs by {gap:.1f} grey levels on average")
    return wrong


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="+", help="LeRobot v3.0 datasets, as simforcing writes them")
    parser.add_argument("--python", default="python3.12", help="interpreter for LeRobot's environment")
    parser.add_argument("--venv", type=Path, default=Path("build/lerobot"), help="where that environment is or is made")
    parser.add_argument("--rows", type=int, default=24, help="rows to compare in each dataset")
    options = parser.parse_args()
    failed = False
    try:
        interpreter = environment(options.venv.absolute(), options.python)
        for root in options.data:
            data = open_dataset(root)
            rows = sampled(data, options.rows)
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "read.npz"
                words = [str(interpreter), "-c", READ, str(root.absolute()), str(out), *map(str, rows)]
                subprocess.run(words, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
                with np.load(out) as stored:
                    theirs = {name: stored[name] for name in stored.files}
            wrong = differences(data, theirs, rows)
            failed |= bool(wrong)
            print(
                f"{root}: lerobot {theirs['version']} reads {len(rows)} rows " + ("otherwise" if wrong else "as we do")
            )
            print("".join(f"  {line}\n" for line in wrong), end="")
    except (SimForcingError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
