"""`simforcing study`: all baselines, ablations and sweeps on the bundled world, and what they say about each claim."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simforcing.errors import SimForcingError

if TYPE_CHECKING:
    from simforcing.evaluate.campaign.plan import Sizes, Unit

COMMAND = "simforcing study"


@dataclass(frozen=True)
class Study:
    """Baselines, ablations and sweeps over several seeds, and for each claim: holds, does not hold, not decided.

    Draws the bundled world, trains, chooses settings on validation clips, measures on test clips. Every training and
    every measurement has a file of its own below OUT; what is there is kept, so the same command goes on after it was
    stopped or killed, and a finished study is only written again.

    Example:
      simforcing study --plan
      simforcing study --out runs/study --results docs/results.md
    """

    out: Path = Path("runs/study")
    """Folder of the study; one of other sizes is refused."""
    results: Path | None = None
    """Markdown file to write, and the same with .json; default OUT/results.md. Replaced."""
    workers: int = 2
    """Processes of one thread each."""
    plan: bool = False
    """Print what is to be done and about how long it takes, and do nothing."""
    write: bool = False
    """Write the results of what is there, and do nothing else."""
    small: bool = False
    """Everything in small, in two minutes: its numbers mean nothing."""
    work: bool = False
    """Be one of the processes, until nothing is left to do."""

    def run(self) -> int:
        """Does what is missing, then writes."""
        from simforcing.evaluate.campaign.plan import Sizes, units

        if self.workers < 1:
            raise SimForcingError(f"--workers {self.workers}: give at least 1")
        sizes = Sizes.small() if self.small else Sizes()
        everything = units(sizes)
        if self.plan:
            return self._say(everything, sizes)
        if self.work:
            return self._work(everything, sizes)
        if not self.write:
            self._claim(sizes)
            self._together(everything)
        return self._write(sizes)

    def _say(self, everything: "list[Unit]", sizes: "Sizes") -> int:
        from simforcing.evaluate.campaign.plan import CALIBRATION
        from simforcing.evaluate.campaign.queue import missing
        from simforcing.evaluate.campaign.speed import Speed, minutes, seconds_of

        left, speed = missing(self.out, everything), Speed.load(self.out / CALIBRATION)
        for unit in left:
            print(f"{seconds_of(unit, sizes, speed) / 60:6.1f} min  {unit}")
        measured = "measured here" if (self.out / CALIBRATION).exists() else "assumed; measured when the study runs"
        print(f"{len(everything)} units, {len(left)} to do with {self.workers} workers (speed {measured}):")
        for kind, (count, total) in minutes(left, sizes, speed, self.workers).items():
            print(f"  {kind}: {count} in about {total:.0f} min")
        return 0

    def _claim(self, sizes: "Sizes") -> None:
        """Makes OUT this study's, and writes what the sweeps' tables are read by."""
        from simforcing.cli.study_work import describe
        from simforcing.evaluate.campaign.plan import SWEEPS, checkpoints_of, run_of, sweep_plan
        from simforcing.evaluate.sweep import begin
        from simforcing.train.directory import claim_run

        claim_run(self.out, describe(sizes))
        for sweep in SWEEPS:
            models = [run_of(*m) for m in checkpoints_of(sizes, sweep)]
            about = {"checkpoints": models, "simulation": "student", "part": "test"}
            begin(self.out / "sweeps" / sweep, sweep_plan(sizes, sweep), about)

    def _work(self, everything: "list[Unit]", sizes: "Sizes") -> int:
        from simforcing.cli.study_work import Worker
        from simforcing.evaluate.campaign.queue import work

        work(self.out, everything, Worker(self.out, sizes).do)
        return 0

    def _together(self, everything: "list[Unit]") -> None:
        """Workers beside each other; their output goes to OUT/worker-N.log. They end when this process does.

        Raises:
            SimForcingError: one of them failed; the others are ended.
        """
        from simforcing.cli.demo import ends_with_us
        from simforcing.cli.show import progress
        from simforcing.evaluate.campaign.queue import missing

        one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS"), "1")
        command = [sys.executable, "-m", "simforcing.cli.main", "study", "--work", "--out", str(self.out)]
        command += ["--small"] if self.small else []
        running: list[tuple[Path, subprocess.Popen[bytes]]] = []
        try:
            for number in range(min(self.workers, len(missing(self.out, everything)))):
                log = self.out / f"worker-{number}.log"
                with log.open("ab") as stream:
                    process = subprocess.Popen(
                        command, stdout=stream, stderr=stream, env=os.environ | one, preexec_fn=ends_with_us()
                    )
                running.append((log, process))
            with progress() as report:
                while any(process.poll() is None for _, process in running):
                    left = missing(self.out, everything)
                    report("study", 1 - len(left) / len(everything), f"{len(left)} of {len(everything)} units left")
                    _check(running)
                    time.sleep(1.0)
            _check(running)
        finally:
            for _, process in running:
                if process.poll() is None:
                    process.terminate()
                    process.wait()

    def _write(self, sizes: "Sizes") -> int:
        from simforcing.evaluate.campaign.page import write

        target = self.results or self.out / "results.md"
        words = " --small" if self.small else ""
        write(self.out, sizes, target, f"{COMMAND}{words}")
        print(f"{target}\n{target.with_suffix('.json')}")
        return 0


def _check(running: "list[tuple[Path, subprocess.Popen[bytes]]]") -> None:
    """Raises SimForcingError for a process that failed, with the last line that it wrote, or that was ended."""
    for log, process in running:
        code = process.poll()
        if code and code < 0:
            raise SimForcingError(
                f"a part of the study was ended by signal {-code}; the same command goes on from there"
            )
        if code:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise SimForcingError(f"a part of the study failed ({log}): {lines[-1] if lines else 'no output'}")
