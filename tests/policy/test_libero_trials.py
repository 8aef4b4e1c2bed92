"""Trials: what one does, several beside each other, bad ends, the folder that keeps them, rates."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from simforcing.data.video import VideoFile
from simforcing.errors import SimForcingError
from simforcing.policy.libero_env import Seen, Task
from simforcing.policy.libero_results import Folder, common_fingerprint, rate, wilson
from simforcing.policy.libero_trials import Job, Outcome, Protocol, attempt, check_actions, run_trials

PROTOCOL = Protocol("libero_object", limit=12, wait=2, replan=5, size=16)
Act = Callable[[Sequence[Seen], Sequence[str], Sequence[int]], np.ndarray]


def task(words: str, index: int = 0) -> Task:
    return Task("libero_object", index, words, Path("none.bddl"), Path("none.npz"))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The toy world, importable here and in the processes."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from toy_world import ToyWorld

    return ToyWorld


class Recorder:
    """A policy that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[str], list[int]]] = []

    def __call__(self, seen: Sequence[Seen], words: Sequence[str], seeds: Sequence[int]) -> np.ndarray:
        self.asked.append((int(seen[0].images["observation.images.image"][0, 0, 0]), list(words), list(seeds)))
        return np.tile(np.float32([0.5, 0, 0, 0, 0, 0, 1]), (len(seen), 8, 1))


def test_one_trial(make: Any) -> None:
    """Waits, asks every five steps, tells the gripper to open (-1), stops when solved."""
    world, asked, shown = make(task("easy"), 16), [], []

    def ask(seen: Seen, seed: int) -> np.ndarray:
        asked.append((int(seen.images["observation.images.image"][0, 0, 0]), seed))
        return np.tile(np.float32([0.5, 0, 0, 0, 0, 0, 1]), (8, 1))

    found = attempt(world, Job(world.task, 4, None), PROTOCOL, ask, lambda: shown.append(world.steps))
    assert found == ("success", 7, 2)  # solved at step 9, two of which were waited
    assert asked == [(2, 42), (7, 42)]
    assert shown == list(range(2, 10))
    np.testing.assert_allclose(world.moves, [3.5, 0, 0, 0, 0, 0, -9])
    solved_while_waiting = attempt(world, Job(world.task, -4, None), replace(PROTOCOL, wait=6), ask, lambda: None)
    assert solved_while_waiting == ("success", 1, 1)  # does not count, nor end the trial


def test_the_limit_cuts_the_last_chunk(make: Any) -> None:
    world = make(task("hard"), 16)
    found = attempt(world, Job(world.task, 0, None), PROTOCOL, lambda s, n: np.zeros((8, 7), np.float32), lambda: None)
    assert found == ("limit", 12, 3) and world.steps == 14


def test_noise_seeds() -> None:
    fresh = replace(PROTOCOL, noise="fresh")
    seeds = {fresh.noise_seed(task, trial, chunk) for task in range(3) for trial in range(3) for chunk in range(3)}
    assert len(seeds) == 27 and fresh.noise_seed(1, 2, 0) == fresh.noise_seed(1, 2, 0)
    assert {PROTOCOL.noise_seed(t, t, t) for t in range(3)} == {42}
    assert replace(PROTOCOL, seed=1).sha256 != PROTOCOL.sha256 == replace(PROTOCOL).sha256
    for name, value in (("limit", 0), ("wait", -1), ("replan", 0), ("denoising", 0), ("size", 1)):
        with pytest.raises(SimForcingError, match=f"{name} is {value}; give at least"):
            replace(PROTOCOL, **{name: value})


TOYS = ("easy", "broken", "dead", "nowhere", "hard")


@pytest.mark.parametrize("workers", [1, 2])
def test_trials_beside_each_other(make: Any, workers: int) -> None:
    """Every trial ends as it does alone, whatever becomes of its neighbours."""
    jobs = [Job(task(w, i), t, None) for i, w in enumerate(TOYS) for t in range(2)]
    act = Recorder()
    found = {(j.task.instruction, j.trial): o for j, o in run_trials(jobs, PROTOCOL, act, workers, make=make)}
    endings = {key: (outcome.ending, outcome.steps) for key, outcome in found.items()}
    assert endings == {
        ("easy", 0): ("success", 3),
        ("easy", 1): ("success", 4),
        ("broken", 0): ("crash", 0),
        ("broken", 1): ("crash", 0),
        ("dead", 0): ("crash", 0),
        ("dead", 1): ("crash", 0),
        ("nowhere", 0): ("crash", 0),
        ("nowhere", 1): ("crash", 0),
        ("hard", 0): ("limit", 12),
        ("hard", 1): ("limit", 12),
    }
    assert found["broken", 0].error == "ValueError: a joint is lost"
    assert "the robot's state holds NaN" in found["nowhere", 1].error
    assert found["dead", 1].error == "the simulation's process ended with code 3"
    assert found["hard", 0].fingerprint == {"simulator": "toy 1", "task": "hash of hard"}
    assert all(len(words) == 1 for _, words, _ in act.asked)


@pytest.mark.slow
def test_a_stuck_simulation_is_a_timeout(make: Any) -> None:
    jobs = [Job(task("stuck"), 0, None), Job(task("easy", 1), 0, None)]
    found = {j.task.instruction: o for j, o in run_trials(jobs, PROTOCOL, Recorder(), 1, 6.0, make)}
    assert found["stuck"].ending == "timeout" and found["stuck"].error == "nothing heard for 6 s"
    assert found["easy"].ending == "success"


def test_a_policy_that_refuses(make: Any) -> None:
    """An error or NaN is that trial's end; what is no fault of the policy's input goes through."""

    def refuse(seen: Sequence[Seen], words: Sequence[str], seeds: Sequence[int]) -> np.ndarray:
        if words[0] == "easy":
            raise SimForcingError("no such camera")
        return np.full((1, 8, 7), np.nan, np.float32)

    jobs = [Job(task("easy"), 0, None), Job(task("hard", 1), 0, None)]
    found = [outcome for _, outcome in run_trials(jobs, PROTOCOL, refuse, 1, make=make)]
    assert [o.ending for o in found] == ["crash", "crash"]
    assert [o.error for o in found] == ["the policy: no such camera", "the policy: actions hold NaN or infinite values"]

    def broken(seen: Sequence[Seen], words: Sequence[str], seeds: Sequence[int]) -> np.ndarray:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(run_trials(jobs, PROTOCOL, broken, 1, make=make))
    with pytest.raises(SimForcingError, match="give at least 1"):
        list(run_trials(jobs, PROTOCOL, refuse, 0, make=make))
    for shape in ((2, 8, 7), (1, 8, 6), (8, 7)):
        with pytest.raises(SimForcingError, match="they must be"):
            check_actions(np.zeros(shape, np.float32), 1)


def folder(out: Path, **changes: Any) -> Folder:
    return Folder(**{"out": out, "policy": "toy", "policy_sha256": "a" * 64, "protocol": PROTOCOL} | changes)


def test_results(make: Any, tmp_path: Path) -> None:
    """Trials are kept one by one with their videos; rates come from exactly those asked for."""
    kept, tasks = folder(tmp_path / "eval"), [task("easy"), task("hard", 1)]
    kept.claim()
    assert kept.read(tasks[0], 0) is None
    with pytest.raises(SimForcingError, match="lacks trial 0, 1, 2"):
        kept.summary(tasks, 3)
    jobs = [kept.job(t, trial, video=True) for t in tasks for trial in range(3)]
    for job, outcome in run_trials(jobs, PROTOCOL, Recorder(), 1, make=make):
        kept.write(job, outcome, videos=2)
    summary = kept.summary(tasks, 3)
    assert summary["suite"] == rate(["success"] * 3 + ["limit"] * 3)
    assert summary["tasks"]["libero_object-00"]["rate"] == 1 and summary["tasks"]["libero_object-01"]["rate"] == 0
    assert summary["fingerprint"]["tasks"] == {
        "libero_object-00": "hash of easy",
        "libero_object-01": "hash of hard",
    }
    assert kept.summary(tasks, 2)["suite"]["trials"] == 4  # a trial more does not count
    names = sorted(path.name for path in (tmp_path / "eval" / "videos").iterdir())
    assert names == [
        f"libero_object-{i:02d}-{t:03d}-{w}.mp4" for i, w in ((0, "success"), (1, "limit")) for t in (0, 1)
    ]
    record = kept.read(tasks[1], 0)
    assert record is not None and record["video"] == "videos/libero_object-01-000-limit.mp4"
    assert VideoFile(tmp_path / "eval" / record["video"], None).probe().frames == 4  # of 13 views every fourth
    assert json.loads(kept.save(summary).read_text())["suite"]["successes"] == 3


def test_stale_trials_are_refused(tmp_path: Path) -> None:
    kept, one = folder(tmp_path), task("easy")
    kept.claim()
    done = Outcome("success", 3, 1, 0.5, "", {"simulator": "toy 1", "task": "t"})
    kept.write(kept.job(one, 0, video=False), done, 0)
    for other, what in (
        (folder(tmp_path, policy_sha256="b" * 64), "policy_sha256"),
        (folder(tmp_path, protocol=replace(PROTOCOL, replan=3)), "protocol_sha256"),
    ):
        with pytest.raises(SimForcingError, match="another configuration"):
            other.claim()
        with pytest.raises(SimForcingError, match=f"trial of another {what}"):
            other.read(one, 0)
    kept.write(kept.job(one, 1, video=False), replace(done, fingerprint={"simulator": "toy 2", "task": "t"}), 0)
    with pytest.raises(SimForcingError, match=r"simulator is 'toy 1' in .* trial 0, 'toy 2' in .* trial 1"):
        kept.summary([one], 2)
    kept.file(one, 1).write_text("{")
    with pytest.raises(SimForcingError, match="a damaged trial"):
        kept.read(one, 1)


def test_crashes_have_no_fingerprint_and_still_count() -> None:
    base = {"suite": "s", "task": 1, "trial": 0}
    shared = common_fingerprint({"a": base | {"fingerprint": {}}, "b": base | {"fingerprint": {"x": "1", "task": "h"}}})
    assert shared == {"x": "1", "tasks": {"s-01": "h"}}
    counted = rate(["success", "crash", "timeout", "limit"])
    assert (counted["rate"], counted["endings"]["crash"], counted["endings"]["timeout"]) == (0.25, 1, 1)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson(pair: tuple[int, int]) -> None:
    low, high = wilson(*pair)
    wanted = binomtest(*pair).proportion_ci(0.95, method="wilson")
    np.testing.assert_allclose([low, high], [wanted.low, wanted.high], atol=1e-9)
    assert 0 <= low <= pair[0] / pair[1] <= high <= 1


def test_wilson_needs_trials() -> None:
    for pair in ((0, 0), (2, 1), (-1, 3)):
        with pytest.raises(SimForcingError, match="at least one trial"):
            wilson(*pair)
