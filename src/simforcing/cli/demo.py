"""`simforcing demo`: the whole road on the bundled world."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from simforcing.errors import SimForcingError, check_seed
from simforcing.files import write_text

if TYPE_CHECKING:
    from simforcing.cli.show import Report

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
RUNS = ("scratch", "finetuned", "student")


@dataclass(frozen=True)
class Demo:
    """Bundled world, pairs, latents, student and baselines, guided rollouts, numbers, report page.

    Each stage that is complete in OUT is kept, so a second call resumes or is quick. The three trainings run beside
    each other, one thread each, for the same time. The page is OUT/report/index.html, the numbers OUT/metrics.json.

    Example:
      simforcing demo --out runs/demo
    """

    out: Path = Path("runs/demo")
    """Directory of the run; one of another configuration is refused."""
    teacher: Literal["bundled", "train"] = "bundled"
    """The teacher that ships with the package, or one trained anew here for --teacher-seconds."""
    seconds: float = 330.0
    """Training time of the student and of each baseline."""
    teacher_seconds: float = 600.0
    """Training time of a new teacher."""
    train_episodes: int = 12
    """Paired episodes to train on."""
    val_episodes: int = 12
    """Paired episodes on which settings are chosen."""
    test_episodes: int = 30
    """Paired episodes that the numbers are about."""
    teacher_episodes: int = 400
    """Simulated episodes with augmented trajectories for a new teacher."""
    seed: int = 0
    """Episodes, weights, order and noise follow from it."""
    workers: int = 2
    """Processes that draw the world."""

    def run(self) -> int:
        """Runs what is missing, prints where the page is."""
        from dataclasses import asdict

        from simforcing.cli.demo_report import evaluate_and_report
        from simforcing.cli.show import progress
        from simforcing.train.directory import claim_run

        check_seed(self.seed, "--seed")
        settings = {k: v for k, v in asdict(self).items() if k not in ("out", "workers")}
        claim_run(self.out, {"command": "demo", "settings": settings, "format": 1})
        log = Stages(self.out / "seconds.json")
        with progress() as report:
            with log.stage("world"):
                self._world(report)
            with log.stage("latents"):
                self._encode(self.out / "pairs", self.out / "latents", self.val_episodes, self.test_episodes)
            if self.teacher == "train":
                with log.stage("teacher"):
                    self._train_teacher()
            with log.stage("training"):
                self._train(report)
            page = self.out / "report" / "index.html"
            if not page.exists() or not (self.out / "metrics.json").exists():
                with log.stage("evaluation and report"):
                    evaluate_and_report(self, log, report)
        print(f"{page.resolve()}\n{(self.out / 'metrics.json').resolve()}")
        return 0

    @property
    def teacher_model(self) -> str:
        """Where the teacher is."""
        return "bundled" if self.teacher == "bundled" else str(self.out / "teacher" / "model")

    def commands(self) -> list[list[str]]:
        """The training commands, as they are run."""
        common = [
            "--data",
            str(self.out / "latents"),
            "--recipe",
            "demo",
            "--seconds",
            str(self.seconds),
            "--seed",
            str(self.seed),
            "--threads",
            "1",
        ]
        roles = {
            "scratch": ["baseline"],
            "finetuned": ["baseline", "--teacher", self.teacher_model],
            "student": ["student", "--teacher", self.teacher_model],
        }
        return [["train", *roles[name], "--out", str(self.out / name), *common] for name in RUNS]

    def _world(self, report: "Report") -> None:
        from simforcing.twin.playground import write_pairs, write_simulation

        first = 1_000_000 * self.seed
        n = self.train_episodes + self.val_episodes + self.test_episodes
        if not (self.out / "pairs").exists():
            write_pairs(
                self.out / "pairs",
                range(first, first + n),
                workers=self.workers,
                progress=lambda i, total: report("drawing the world", i / total, f"{i} of {total} episodes"),
            )
        if self.teacher == "train" and not (self.out / "simulation").exists():
            seeds = range(first + 500_000, first + 500_000 + self.teacher_episodes)
            write_simulation(
                self.out / "simulation",
                seeds,
                workers=self.workers,
                progress=lambda i, total: report(
                    "drawing simulation for the teacher", i / total, f"{i} of {total} episodes"
                ),
            )

    def _encode(self, data: Path, out: Path, val: int, test: int) -> None:
        from simforcing.cli.encode import Encode

        if not (out / "split.json").exists():
            Encode(data, out, recipe="demo", val=val, test=test, seed=self.seed).run()

    def _train_teacher(self) -> None:
        from simforcing.cli.train import Train

        self._encode(self.out / "simulation", self.out / "simulation-latents", max(1, self.teacher_episodes // 20), 0)
        if not (self.out / "teacher" / "model").exists():
            Train(
                "teacher",
                data=self.out / "simulation-latents",
                out=self.out / "teacher",
                seconds=self.teacher_seconds,
                seed=self.seed,
            ).run()

    def _train(self, report: "Report") -> None:
        waiting = [c for c, name in zip(self.commands(), RUNS, strict=True) if not (self.out / name / "model").exists()]
        if waiting:
            together(waiting, self.out, lambda share: report("training student and baselines", share, ""))


class Stages:
    """Seconds of each stage, kept in a file over resumed calls."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a stage, also one that fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - began, 2)
            write_text(self.file, json.dumps(self.seconds, indent=2) + "\n")


def together(commands: Sequence[Sequence[str]], out: Path, report: Any) -> None:
    """Runs commands of this program beside each other, one thread each; their output goes to OUT/<run>.log.

    They end when this process does; on Linux also when it is killed.

    Raises:
        SimForcingError: one of them failed; the others are ended.
    """
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    running: list[tuple[Path, subprocess.Popen[bytes]]] = []
    try:
        for command in commands:
            run = Path(command[command.index("--out") + 1])
            file = out / f"{run.name}.log"
            with file.open("ab") as stream:
                process = subprocess.Popen(
                    [sys.executable, "-m", "simforcing.cli.main", *command],
                    stdout=stream,
                    stderr=stream,
                    env=environment,
                    preexec_fn=ends_with_us(),
                )
            running.append((run, process))
        while any(process.poll() is None for _, process in running):
            for run, process in running:
                if process.poll():
                    raise _failure(out / f"{run.name}.log")
            report(min(share_done(run) for run, _ in running))
            time.sleep(1.0)
        for run, process in running:
            if process.returncode:
                raise _failure(out / f"{run.name}.log")
    finally:
        for _, process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()


def ends_with_us() -> Callable[[], None] | None:
    """What a child calls before it begins, so that on Linux it gets SIGTERM when this process ends, however."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(1)

    return ask


def _failure(log: Path) -> SimForcingError:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return SimForcingError(f"training failed ({log}): {lines[-1] if lines else 'no output'}")


def share_done(run: Path) -> float:
    """How far a training run in seconds has come, from its log."""
    try:
        length = float(json.loads((run / "run.json").read_text())["training"]["seconds"])
        last = (run / "log.jsonl").read_bytes()[-2000:].decode(errors="ignore").strip().splitlines()[-1]
        return min(1.0, float(json.loads(last)["seconds"]) / length)
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return 0.0  # not begun
