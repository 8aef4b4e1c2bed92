"""`simforcing policy demos`: demonstrations of LIBERO tasks without recordings of people."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from simforcing.errors import SimForcingError, check_seed

if TYPE_CHECKING:
    from simforcing.policy.libero_env import Task


@dataclass(frozen=True, kw_only=True)
class PolicyDemos:
    """Demonstrations of LIBERO's pick-and-place tasks by a scripted expert: a LeRobot v3.0 dataset.

    Example:
      simforcing policy demos --suite libero_object --tasks 0 ketchup butter --episodes 40 --out data/demos
      simforcing policy demos --suite libero_spatial --episodes 20 --rate

    The expert knows the simulator's state and moves with noise; what it does not solve is left out and counted. It does
    all tasks of libero_object, and those of libero_spatial whose bowl can be reached from above. A run that was ended
    goes on where it stopped. Both cameras are as in public recordings (upright, mirrored), states have 8 numbers,
    actions 7 (gripper: 1 open, 0 closed).
    """

    suite: Literal["libero_object", "libero_spatial", "libero_goal", "libero_10", "libero_90"]
    """Suite of the tasks."""
    episodes: int
    """Demonstrations of each task."""
    out: Path | None = None
    """Dataset to make; must not exist."""
    rate: bool = False
    """Only say how often the expert succeeds, an attempt an episode: no pictures, no dataset."""
    tasks: tuple[str, ...] = ()
    """Numbers of tasks, or words that only one instruction has; default: all."""
    seed: int = 0
    """Same seed, same demonstrations."""
    noise: float = 1.0
    """How much the expert's motion is disturbed; 0: not at all."""
    size: int = 256
    """Pixels of a picture's side."""
    workers: int = 1
    """Processes that simulate beside each other."""
    parts: Path | None = None
    """Folder of finished demonstrations; given, it is kept, so that a larger dataset can be made of the same.
    Default: <out>.parts, deleted at the end."""

    def run(self) -> int:
        """Makes what is missing, puts it together, checks it, and says how often the expert succeeded."""
        from simforcing.policy.libero_env import choose, suite_tasks

        check_seed(self.seed, "--seed")
        if self.rate == (self.out is not None):
            raise SimForcingError("give either --out, a dataset to make, or --rate")
        if self.rate and self.parts is not None:
            raise SimForcingError("--rate keeps nothing, so it has no --parts")
        if self.out is not None and self.out.exists():
            raise SimForcingError(f"{self.out}: exists already; choose another --out, or delete it first")
        tasks = choose(suite_tasks(self.suite), self.tasks)
        return self._measure(tasks) if self.out is None else self._make(tasks, self.out)

    def _measure(self, tasks: list[Task]) -> int:
        from simforcing.cli.policy_eval import say_rate
        from simforcing.cli.show import counted, progress
        from simforcing.policy.demos import Making, measure_expert
        from simforcing.policy.libero_results import rate

        making = Making(Path(), self.size, self.seed, self.noise)
        with progress() as report:
            found = measure_expert(
                making,
                tasks,
                self.episodes,
                self.workers,
                counted("attempts", report),
            )
        for task in tasks:
            reasons = found[task.name]
            print(f"{task.name}  {say_rate(rate(['limit' if r else 'success' for r in reasons]))}  {task.instruction}")
            for reason in sorted({reason for reason in reasons if reason}):
                print(f"  {reasons.count(reason)} x {reason}")
        return 0

    def _make(self, tasks: list[Task], out: Path) -> int:
        from simforcing.cli.show import counted, progress
        from simforcing.data import open_dataset
        from simforcing.policy.demos import Making, assemble_demos, make_demos, where_all_stand
        from simforcing.policy.libero_check import check_recordings

        making = Making(self.parts or out.with_name(f"{out.name}.parts"), self.size, self.seed, self.noise)
        with progress() as report:
            summary = make_demos(
                making,
                tasks,
                self.episodes,
                self.workers,
                counted("demonstrations", report),
            )
        stand = where_all_stand(tasks, self.size)
        assemble_demos(making, tasks, self.episodes, out, summary, stand)
        if self.parts is None:
            shutil.rmtree(making.parts, ignore_errors=True)
        for task in tasks:
            row = summary[task.name]
            share = f"{row['episodes']}/{row['attempts']} attempts = {100 * row['episodes'] / row['attempts']:.0f} %"
            print(f"{task.name}  {share}  {task.instruction}")
        dataset = open_dataset(out)
        for what, wrong in check_recordings(dataset).items():
            print(f"doubtful: {what}: {wrong}")
        print(f"{out}: {len(dataset)} demonstrations, {sum(dataset.lengths)} frames")
        return 0
