"""Trials of a policy on LIBERO: what is done in one, and several beside each other, each in a process of its own.

Legend: H W pixels, A action steps. The processes simulate; the policy stays here and is asked. A trial depends on its
number, the protocol and the policy, never on what runs beside it or before.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Float32

from simforcing.data.video import VideoWriter
from simforcing.errors import SimForcingError
from simforcing.files import partial_path
from simforcing.policy.libero_env import HZ, Environment, Libero, Seen, Task
from simforcing.policy.libero_numbers import GRIPPER, STAY_OPEN, from_recording

Array = np.ndarray[Any, np.dtype[Any]]
Ending = Literal["success", "limit", "timeout", "crash"]
LIMITS = {"libero_spatial": 400, "libero_object": 400, "libero_goal": 400, "libero_10": 700, "libero_90": 700}
Act = Callable[[Sequence[Seen], Sequence[str], Sequence[int]], Float32[Array, "B A 7"]]
"""A policy: what is seen, instructions and noise seeds, one a sample -> actions as they are recorded."""
FILM_EVERY = 4
"""Steps from one frame of a video to the next; it plays in real time."""
Make = Callable[[Task, int], Environment]
"""A task and the pictures' size -> its simulation; a function or class that can be imported by name."""


@dataclass(frozen=True)
class Protocol:
    """How trials are run; FastWAM's where nothing else is said.

    wait: steps with the gripper open before the policy begins, not counted in the limit.
    limit: steps of the policy until a trial has failed.
    replan: steps that are executed of each chunk of actions.
    denoising: steps from noise to actions.
    noise: `fixed` starts every chunk of every trial from the same noise, `fresh` from noise of its own.
    binarise: the gripper is told to open or to close, nothing between.
    batched: decide for several trials at once. Faster on a GPU; the last digits then depend on which trials.
    size: pixels of a picture's side.
    """

    suite: str
    limit: int
    wait: int = 30
    replan: int = 10
    denoising: int = 10
    seed: int = 42
    noise: Literal["fixed", "fresh"] = "fixed"
    binarise: bool = True
    batched: bool = False
    size: int = 256

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("wait", 0), ("replan", 1), ("denoising", 1), ("size", 2)):
            if getattr(self, name) < least:
                raise SimForcingError(f"protocol: {name} is {getattr(self, name)}; give at least {least}")

    @property
    def sha256(self) -> str:
        """Of all that it says."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def noise_seed(self, task: int, trial: int, chunk: int) -> int:
        """What the noise of a chunk follows from."""
        if self.noise == "fixed":
            return self.seed
        return int(np.random.SeedSequence([self.seed, task, trial, chunk]).generate_state(1)[0])


class Job(NamedTuple):
    """One trial to do; `video`: where to write what was seen, if it is to be kept."""

    task: Task
    trial: int
    video: Path | None


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: solved by the simulator's own check; at the limit; without an answer in time; by an error.

    steps: of the policy. chunks: how often it was asked. seconds: all of it. video: what was seen, not yet in place.
    """

    ending: Ending
    steps: int
    chunks: int
    seconds: float
    error: str = ""
    fingerprint: dict[str, str] = field(default_factory=dict)
    video: Path | None = None


def attempt(
    environment: Environment,
    job: Job,
    protocol: Protocol,
    ask: Callable[[Seen, int], Float32[Array, "A 7"]],
    show: Callable[[], None],
) -> tuple[Ending, int, int]:
    """One trial: how it ended, after how many steps and chunks. Solved while things come to rest does not count.

    show: called when there is something new to see.
    """
    environment.start(job.trial, protocol.seed)
    for _ in range(protocol.wait):
        environment.step(STAY_OPEN)
    show()
    steps = chunks = 0
    while steps < protocol.limit:
        plan = ask(environment.look(), protocol.noise_seed(job.task.index, job.trial, chunks))
        chunks += 1
        for action in from_recording(plan[: min(protocol.replan, protocol.limit - steps)], protocol.binarise):
            solved = environment.step(action)
            steps += 1
            show()
            if solved:
                return "success", steps, chunks
    return "limit", steps, chunks


# -- in a process of its own -------------------------------------------------------------------------------------------


def serve_trials(pipe: Any, protocol: Protocol, make: Make) -> None:
    """A worker: takes jobs until there is None, asks for actions, tells how each ended; the task's world is kept."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent that answers Ctrl-C
    environment: Environment | None = None
    task: Task | None = None
    try:
        while (job := pipe.recv()) is not None:
            if environment is None or task != job.task:
                if environment is not None:
                    environment.close()
                try:
                    environment, task = make(job.task, protocol.size), job.task
                except SimForcingError as error:
                    pipe.send(_Unusable(str(error)))
                    return
            pipe.send(_told(pipe, environment, job, protocol))
    except (EOFError, BrokenPipeError):
        pass  # nobody is left to ask
    except BaseException as error:
        with suppress(OSError):
            pipe.send(_Failed(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]))
        raise
    finally:
        if environment is not None:
            environment.close()


class _Question(NamedTuple):
    seen: Seen
    seed: int


class _Failed(NamedTuple):
    error: str


class _Unusable(NamedTuple):
    """No trial can be done: there is no renderer, or no such task."""

    error: str


def _told(pipe: Any, environment: Environment, job: Job, protocol: Protocol) -> Outcome:
    begun = time.monotonic()
    video = _Film(job.video, environment) if job.video else None

    def ask(seen: Seen, seed: int) -> Float32[Array, "A 7"]:
        pipe.send(_Question(seen, seed))
        actions: Float32[Array, "A 7"] = pipe.recv()
        return actions

    try:
        ending, steps, chunks = attempt(environment, job, protocol, ask, video.show if video else lambda: None)
    except BaseException:
        if video:
            video.drop()
        raise
    place = video.close() if video else None
    return Outcome(ending, steps, chunks, time.monotonic() - begun, "", environment.fingerprint(), place)


class _Film:
    """What all cameras see, side by side, written as it comes, under a temporary name; a picture costs many steps, so
    that only some are taken, and the last.
    """

    def __init__(self, path: Path, environment: Environment) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = partial_path(path)
        self._environment = environment
        self._file: VideoWriter | None = None
        self._calls = 0

    def show(self) -> None:
        self._calls += 1
        if self._calls % FILM_EVERY == 1:
            self._write()

    def _write(self) -> None:
        frame = np.concatenate(list(self._environment.look().images.values()), axis=1)
        if self._file is None:
            height, width = frame.shape[:2]
            self._file = VideoWriter(self.path, fps=HZ / FILM_EVERY, height=height, width=width, crf=20)
        self._file.write(frame[None])

    def close(self) -> Path:
        if self._calls % FILM_EVERY != 1:
            self._write()
        assert self._file is not None
        self._file.close()
        return self.path

    def drop(self) -> None:
        if self._file is not None:
            self._file.abort()
        self.path.unlink(missing_ok=True)


# -- in this process ---------------------------------------------------------------------------------------------------


class _Worker:
    """A process that simulates. A fresh one takes its place when it has died."""

    def __init__(self, protocol: Protocol, make: Make) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve_trials, args=(theirs, protocol, make), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Job | None = None
        self.begun = self.heard = time.monotonic()
        self.asked = 0

    def give(self, job: Job) -> None:
        self.job, self.asked = job, 0
        self.begun = self.heard = time.monotonic()
        self.pipe.send(job)

    def lost(self, ending: Ending, error: str) -> Outcome:
        return Outcome(ending, 0, self.asked, time.monotonic() - self.begun, error)

    def end(self) -> None:
        """Lets it go: asked first, killed if it does not listen."""
        with suppress(OSError):
            self.pipe.send(None)
        self.process.join(0.0 if self.job else 10.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def run_trials(
    jobs: Iterable[Job], protocol: Protocol, act: Act, workers: int = 1, patience: float = 600.0, make: Make = Libero
) -> Iterator[tuple[Job, Outcome]]:
    """Jobs with their outcomes, in the order in which they end; a job is taken when a worker is free.

    A worker that says nothing for `patience` seconds is ended, and its trial a `timeout`; one that dies, or a policy
    that refuses what it is shown, makes a `crash`. The next trial gets a fresh worker.

    Raises:
        SimForcingError: workers or patience are not usable, or nothing can be simulated here.
    """
    if workers < 1 or not patience > 0:
        raise SimForcingError(
            f"{workers} workers with a patience of {patience:g} s; give at least 1, and a positive time"
        )
    waiting, free, busy = iter(jobs), list[_Worker](), list[_Worker]()
    try:
        while True:
            while len(busy) < workers and (next_job := next(waiting, None)) is not None:
                worker = free.pop() if free else _Worker(protocol, make)
                worker.give(next_job)
                busy.append(worker)
            if not busy:
                return
            for worker, outcome in _listen(busy, protocol, act, patience):
                job, worker.job = worker.job, None
                assert job is not None
                busy.remove(worker)
                if outcome.ending in ("timeout", "crash"):
                    worker.process.kill()
                    worker.end()
                else:
                    free.append(worker)
                yield job, outcome
    finally:
        for worker in busy + free:
            worker.end()


def _listen(busy: Sequence[_Worker], protocol: Protocol, act: Act, patience: float) -> list[tuple[_Worker, Outcome]]:
    """Waits for the workers, answers their questions, and gives the trials that have ended."""
    left = min(worker.heard for worker in busy) + patience - time.monotonic()
    ready = connection.wait([worker.pipe for worker in busy], timeout=max(0.0, left))
    ended: list[tuple[_Worker, Outcome]] = []
    questions: list[tuple[_Worker, _Question]] = []
    for worker in busy:
        if worker.pipe not in ready:
            if time.monotonic() - worker.heard > patience:
                ended.append((worker, worker.lost("timeout", f"nothing heard for {patience:g} s")))
            continue
        said = _heard(worker)
        if isinstance(said, _Question):
            questions.append((worker, said))
        else:
            ended.append((worker, said))
    groups = [questions] if protocol.batched else [[question] for question in questions]
    return ended + [lost for group in groups if group for lost in _answer(group, act)]


def _heard(worker: _Worker) -> _Question | Outcome:
    worker.heard = time.monotonic()
    try:
        said = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join(5.0)
        return worker.lost("crash", f"the simulation's process ended with code {worker.process.exitcode}")
    if isinstance(said, _Unusable):
        raise SimForcingError(said.error)
    if isinstance(said, _Failed):
        return worker.lost("crash", said.error)
    assert isinstance(said, _Question | Outcome)
    return said


def _answer(group: Sequence[tuple[_Worker, _Question]], act: Act) -> list[tuple[_Worker, Outcome]]:
    """Sends actions to all who ask. What the policy refuses, or answers with NaN, ends their trials."""
    jobs = [worker.job for worker, _ in group]
    words = [job.task.instruction for job in jobs if job is not None]
    try:
        actions = check_actions(act([q.seen for _, q in group], words, [q.seed for _, q in group]), len(group))
    except SimForcingError as error:
        return [(worker, worker.lost("crash", f"the policy: {error}")) for worker, _ in group]
    lost = []
    for (worker, _), plan in zip(group, actions, strict=True):
        worker.asked += 1
        try:
            worker.pipe.send(plan)
        except OSError:
            lost.append((worker, worker.lost("crash", "the simulation's process ended while the policy thought")))
        worker.heard = time.monotonic()
    return lost


def check_actions(actions: Float[Array, "B A 7"], count: int) -> Float32[Array, "B A 7"]:
    """Raises SimForcingError where a policy's answer is no batch of finite actions."""
    if actions.ndim != 3 or actions.shape[0] != count or actions.shape[2] != GRIPPER + 1:
        raise SimForcingError(f"actions of shape {list(actions.shape)}, they must be [{count}, steps, {GRIPPER + 1}]")
    if not np.isfinite(actions).all():
        raise SimForcingError("actions hold NaN or infinite values")
    return np.asarray(actions, np.float32)


def keep_video(outcome: Outcome, path: Path | None) -> bool:
    """Puts a trial's video into its place, or deletes it (None); whether there is one now."""
    if outcome.video is None:
        return False
    if path is None:
        outcome.video.unlink(missing_ok=True)
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    os.replace(outcome.video, path)
    return True
