"""A small model and small random clips, for the tests of this room."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from simforcing.model.experts import ExpertConfig
from simforcing.model.world_model import WorldModel, WorldModelConfig
from simforcing.train.batches import LatentClips
from simforcing.train.checkpoint import claim_run
from simforcing.train.loop import Run, TrainConfig
from simforcing.train.objective import ObjectiveConfig
from simforcing.train.roles import distilled_loss, student_of

CLIPS = 10


def tiny(seed: int = 0, layers: int = 2, **changes: Any) -> WorldModel:
    """A world model of 15,000 parameters a layer for latents of 3 channels."""
    sizes = {"num_layers": layers, "num_heads": 2, "head_dim": 12, "text_dim": 8, "freq_dim": 16}
    torch.manual_seed(seed)
    return WorldModel(
        WorldModelConfig(ExpertConfig(24, 48, **sizes), ExpertConfig(16, 32, **sizes), channels=3, **changes)
    )


def random_clips(n: int = CLIPS, seed: int = 0) -> LatentClips:
    """Paired clips: 3 latent frames of 3 x 4 x 4, 8 actions, two tasks; episode 10 + i // 2, start i % 2."""
    g = torch.Generator().manual_seed(seed)
    i = torch.arange(n)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    return LatentClips(
        action=torch.randn(n, 8, 7, generator=g),
        proprio=torch.randn(n, 7, generator=g),
        task=i % 2,
        text={
            "real": (torch.randn(2, 3, 8, generator=g), mask),
            "sim": (torch.randn(2, 3, 8, generator=g), mask),
        },
        episode=10 + i // 2,
        start=i % 2,
        real=torch.randn(n, 3, 3, 4, 4, generator=g),
        sim=torch.randn(n, 3, 3, 4, 4, generator=g),
    )


def student_run(
    out: Path, *, config: dict[str, Any] | None = None, claim: bool = True, layers: int = 1, **parts: Any
) -> Run:
    """A student of 12 steps with a log row after each and a checkpoint at the end; claims its directory."""
    defaults: dict[str, Any] = {"steps": 12, "batch_size": 3, "lr": 1e-2, "log_every": 1, "checkpoint_seconds": 1e9}
    training = TrainConfig(**defaults | (config or {}))
    if claim:
        claim_run(out, {"steps": training.steps})
    teacher = tiny(1, layers, sim_condition=False)
    values = {"model": student_of(teacher), "loss": distilled_loss(teacher, ObjectiveConfig())} | parts
    return Run(clips=random_clips(), config=training, out=out, **values)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order only, so that equal runs are equal to the bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def new_model() -> Callable[..., WorldModel]:
    return tiny


@pytest.fixture
def new_clips() -> Callable[..., LatentClips]:
    return random_clips


@pytest.fixture
def new_run() -> Callable[..., Run]:
    return student_run
