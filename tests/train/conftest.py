"""A small model, small random clips, and the reference models, for the tests of this room."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from simforcing.model.experts import ExpertConfig
from simforcing.model.released import our_state
from simforcing.model.world_model import WorldModel, WorldModelConfig, load_strictly
from simforcing.train.batches import LatentClips
from simforcing.train.checkpoint import claim_run
from simforcing.train.loop import Run, TrainConfig
from simforcing.train.objective import ObjectiveConfig
from simforcing.train.roles import distilled_loss, student_of

CLIPS = 10


def tiny(seed: int = 0, **changes: Any) -> WorldModel:
    """A world model of 30,000 parameters for latents of 3 channels."""
    sizes = {"num_layers": 2, "num_heads": 2, "head_dim": 12, "text_dim": 8, "freq_dim": 16}
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


def student_run(out: Path, *, config: dict[str, Any] | None = None, **parts: Any) -> Run:
    """A student of 12 steps with a log row after each and a checkpoint at the end; claims its directory."""
    defaults: dict[str, Any] = {"steps": 12, "batch_size": 3, "lr": 1e-2, "log_every": 1, "checkpoint_seconds": 1e9}
    training = TrainConfig(**defaults | (config or {}))
    claim_run(out, {"steps": training.steps})
    teacher = tiny(seed=1, sim_condition=False)
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


@dataclass(frozen=True)
class Reference:
    """Student and teacher of the reference with the tensors and metadata of its losses."""

    student: WorldModel
    teacher: WorldModel
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        meta = file.metadata()
        loaded = {k: json.loads(meta[k]) for k in ("config", "no_grad", "zero_grad") if k in meta}
        return {k: file.get_tensor(k) for k in file.keys()}, loaded


def _expert(config: dict[str, Any]) -> ExpertConfig:
    return ExpertConfig(
        dim=config["hidden_dim"], ffn_dim=config["ffn_dim"], num_layers=config["num_layers"],
        num_heads=config["num_heads"], head_dim=config["attn_head_dim"], text_dim=config["text_dim"],
        freq_dim=config["freq_dim"], eps=config["eps"],
    )  # fmt: skip


@pytest.fixture(scope="session")
def reference(parity: Path) -> Reference:
    """The teacher gets the student's proprioception encoder, as in the released code."""
    weights, meta = _read(parity / "forward.safetensors")
    teacher_weights, _ = _read(parity / "teacher.safetensors")
    tensors, loss_meta = _read(parity / "loss.safetensors")
    video, action = (_expert(meta["config"][k]) for k in ("video", "action"))
    channels = meta["config"]["video"]["in_dim"]

    def build(state: dict[str, Tensor], sim: bool) -> WorldModel:
        model = WorldModel(WorldModelConfig(video, action, channels, sim_condition=sim))
        load_strictly(model, our_state(state), "reference")
        return model

    proprio = {k: v for k, v in weights.items() if k.startswith("proprio_encoder.")}
    student = build({k: v for k, v in weights.items() if k.startswith("mot.")} | proprio, sim=True)
    mot = {k.removeprefix("teacher."): v for k, v in teacher_weights.items() if k.startswith("teacher.mot.")}
    teacher = build(mot | proprio, sim=False).eval()
    return Reference(student, teacher, tensors, loss_meta)
