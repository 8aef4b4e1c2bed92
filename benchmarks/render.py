"""Times the simulated twin: drawing one frame, and pairing end to end.

    python benchmarks/render.py                              bundled arms, pairing of a few bundled episodes
    python benchmarks/render.py --data DIR --robot R.urdf    pairing of that dataset by that robot instead
    python benchmarks/render.py --json                       the same numbers as JSON

A frame is 224x320, without shadow, of an arm in motion; opening the renderer is not counted. Pairing counts everything:
audit, inverse kinematics, drawing, quality checks, encoding both views, and starting the worker processes. All numbers
are medians over the rounds.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from simforcing.twin.camera import default_camera
from simforcing.twin.pairs import pair
from simforcing.twin.playground import WorldConfig, write_pairs
from simforcing.twin.render import ArmRenderer
from simforcing.twin.robot import BUNDLED, Robot

HEIGHT, WIDTH, FRAMES = 224, 320, 60


@dataclass
class Row:
    """One line: what was timed, its median, and the fastest and slowest round."""

    what: str
    unit: str
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, what: str, unit: str, values: list[float]) -> "Row":
        return cls(what, unit, statistics.median(values), min(values), max(values))


def drawing(spec: str, rounds: int) -> list[Row]:
    """Milliseconds a frame, as picture and as mask."""
    robot = Robot.load(spec)
    middle, sway = robot.home, 0.2 * np.sin(np.linspace(0, 2 * np.pi, FRAMES))
    path = np.clip(middle + sway[:, None], *robot.limits.T)
    times: dict[str, list[float]] = {"picture": [], "mask": []}
    with ArmRenderer(robot, default_camera(robot, WIDTH, HEIGHT), HEIGHT, WIDTH) as renderer:
        for _ in range(rounds + 1):
            for what, draw in (("picture", renderer.picture), ("mask", renderer.mask)):
                began = time.perf_counter()
                for q in path:
                    draw(q, 0.5)
                times[what].append(1e3 * (time.perf_counter() - began) / FRAMES)
    return [Row.of(f"{robot.name}, {what}", "ms a frame", values[1:]) for what, values in times.items()]


def pairing(data: Path, spec: str, workers: int, rounds: int, folder: Path) -> list[Row]:
    """Frames a second, and seconds for all of it."""
    seconds, frames = [], 0
    for i in range(rounds):
        began = time.perf_counter()
        made = pair(data, folder / f"{workers}-{i}", Robot.load(spec), workers=workers)
        seconds.append(time.perf_counter() - began)
        frames = made.frames
    what = f"pairing, {made.episodes} episodes, {workers} worker{'s' * (workers > 1)}"
    return [Row.of(what, "frames a second", [frames / s for s in seconds]), Row.of(what, "seconds", seconds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="dataset to pair; default a few episodes of the bundled world")
    parser.add_argument("--robot", default="widowx250s", help="robot of that dataset")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is timed")
    parser.add_argument("--json", action="store_true", help="rows as JSON on standard output")
    options = parser.parse_args()
    rows = [row for spec in BUNDLED for row in drawing(spec, options.rounds)]
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), options.data
        if data is None:
            data = write_pairs(folder / "world", range(4), WorldConfig(size=HEIGHT), workers=2)
        for workers in (1, 2):
            rows += pairing(data, options.robot, workers, options.rounds, folder)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{platform.machine()}, {cores} logical CPUs, MUJOCO_GL={os.environ.get('MUJOCO_GL', '')}")
    print(f"{'':<36}{'median':>9}{'least':>9}{'most':>9}")
    for row in rows:
        print(f"{row.what:<36}{row.median:>9.1f}{row.least:>9.1f}{row.most:>9.1f}  {row.unit}")


if __name__ == "__main__":
    main()
