"""Exchanged actions, motion agreement, and choosing settings."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from simforcing.evaluate.clips import EvaluationClips
from simforcing.evaluate.study import Choice, Grid, Models, Setting, Study, choose, motion_agreement, student_name


def clips(episodes: list[int], seed: int = 0) -> EvaluationClips:
    """Clips of 4 x 4 pixels with random content."""
    rng = np.random.default_rng(seed)
    n = len(episodes)
    video = rng.integers(0, 255, (2, n, 5, 32, 32, 3), dtype=np.uint8)
    action, proprio = rng.normal(size=(n, 4, 7)).astype(np.float32), rng.normal(size=(n, 7)).astype(np.float32)
    starts = np.arange(n)
    return EvaluationClips(video[0], video[1], action, proprio, ["x"] * n, np.array(episodes), starts, 5.0)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=6))
def test_exchanged_actions_come_from_another_episode(counts: list[int]) -> None:
    episodes = [e for e, n in enumerate(counts) for _ in range(n)]
    found = clips(episodes)
    others = found.others()
    assert sorted(others) == list(range(len(episodes)))  # each clip's actions are used once
    same = int((found.episode[others] == found.episode).sum())
    assert same == max(0, 2 * max(counts) - len(episodes))  # as few as can be
    assert (others != np.arange(len(episodes))).all()


def test_noise_of_a_clip_follows_from_its_episode_and_start() -> None:
    three, one = clips([0, 1, 2]), clips([2])
    seeds = three.begin(7).seeds
    assert seeds is not None and len(set(seeds)) == 3
    assert three.begin(7).seeds == seeds
    assert three.begin(8).seeds != seeds
    assert one.begin(7).seeds != seeds[2:]  # another start


def test_motion_agreement_is_a_cosine_of_differences() -> None:
    real = torch.randn(3, 2, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    still = torch.zeros(3, 2, 1, 1, 1)
    assert abs(motion_agreement(real, real + still + 5) - 1) < 1e-6
    assert abs(motion_agreement(real, -2 * real) + 1) < 1e-6
    assert abs(motion_agreement(real, torch.randn_like(real))) < 0.5


class Fake:
    """A predictor whose error is known: it adds `|steps - best|` and the distance of w from its best to the truth."""

    def __init__(self, truth: np.ndarray, best_steps: int, best_w: float = 0.0) -> None:
        self.truth, self.best_steps, self.best_w = truth, best_steps, best_w

    def real(self, start: object, steps: int, sim: object = None, guidance: object = None) -> float:
        off = 0.0 if sim is None else abs(guidance.w - self.best_w) * 20  # type: ignore[attr-defined]
        return 4.0 + 3 * abs(steps - self.best_steps) + off + (0 if sim is None else float(sim))  # type: ignore[arg-type]

    def simulation(self, start: object, steps: int) -> float:
        return float(abs(steps - self.best_steps))

    def encode(self, frames: np.ndarray) -> float:
        return 0.5

    def decode(self, error: float) -> np.ndarray:
        return np.clip(self.truth.astype(float) + error, 0, 255).astype(np.uint8)


def test_settings_are_chosen_by_validation_alone() -> None:
    val = clips([0, 1, 2])
    student, teacher = Fake(val.real, best_steps=3, best_w=0.6), Fake(val.real, best_steps=4)
    models = Models(teacher, student, Fake(val.real, best_steps=1), Fake(val.real, best_steps=10))  # type: ignore[arg-type]
    found: Choice = choose(Study(val, models), Grid())
    assert dict(found.steps) == {"scratch": 1, "finetuned": 10, "student": 3}
    assert found.student["teacher"] == Setting("teacher", 0.6, 4, 3)
    assert found.student["rendered"] == Setting("rendered", 0.6, 1, 3)
    assert found.best == "teacher"  # its simulation is better than the student's own
    assert {t["name"] for t in found.tried} == {"scratch", "finetuned", "student"}


def test_rows_are_named_by_weight_and_source() -> None:
    assert student_name(None, 0.0) == student_name("teacher", 0.0) == "student, w = 0"
    assert student_name("rendered", 0.3) == "student, w = 0.3, rendered simulation"
