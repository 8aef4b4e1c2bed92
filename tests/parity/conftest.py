"""The reference vectors, and the models that they were computed with.

Sizes, cases, steps and weights are all read from the files, so that these tests run on any set of vectors with the
same names: `SIMFORCING_PARITY_DIR=... pytest tests/parity`.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from simforcing.model.experts import ExpertConfig
from simforcing.model.released import our_state
from simforcing.model.world_model import WorldModel, WorldModelConfig, load_strictly

Tensors = dict[str, Tensor]

SHARED = Path(__file__).resolve().parents[3] / "shared"
DIRECTORY = Path(
    os.environ.get("SIMFORCING_PARITY_DIR") or Path(os.environ.get("SIMFORCING_SHARED", SHARED), "reference")
)

CASES = {
    "forward_case": ("forward", r"out\.(.+)"),
    "traced": ("forward_trace", r"mid\.(.+\.block\d+\.(?:video|action))"),
    "loss_case": ("loss", r"(.+)\.out\.loss_video"),
    "watched_case": ("loss", r"(.+)\.mid\.weight"),
    "gradient_case": ("loss", r"(.+)\.gradnorm\.__total__"),
    "simulation": ("sample", r"out\.sim_latents(.*)"),
    "video": ("sample", r"out\.real\.(.+)"),
    "stepwise": ("sample", r"mid\.real\.(.+)\.step0\.v"),
    "count": ("sample", r"sched\.(\d+)\.timesteps"),
    "resized": ("extras", r"resize\.(\d+)\.src"),
    "total": ("extras", r"lr\.total(\d+)"),
    "policy_case": ("policy", r"(.+)\.out\.loss_action"),
    "policy_prediction": ("policy", r"(.+)\.mid\.pred_action"),
    "policy_gradient": ("policy", r"(.+)\.gradnorm\.__total__"),
    "acted": ("policy", r"infer\.(uncond\.n\d+.*)\.action"),
    "imagined": ("policy", r"infer\.(.+)\.video"),
    "policy_mask": ("policy", r"mask\.(.+)"),
}
"""What a test's argument runs over: names found in a file."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case that a file holds; where there is no file, one that says so."""
    for argument in CASES.keys() & set(metafunc.fixturenames):
        name, pattern = CASES[argument]
        found = ["none"]
        if (path := DIRECTORY / f"{name}.safetensors").is_file():
            with safe_open(path, "pt") as file:
                found = sorted(m[1] for key in file.keys() if (m := re.fullmatch(pattern, key)))
        assert found, f"{path} holds nothing like {pattern}"
        metafunc.parametrize(argument, found)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sums in one order only."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def read(parity: Path) -> Callable[[str], tuple[Tensors, dict[str, Any]]]:
    """Tensors and metadata of a file; masks and flags are bytes in it."""
    files: dict[str, tuple[Tensors, dict[str, Any]]] = {}

    def reader(name: str) -> tuple[Tensors, dict[str, Any]]:
        if name not in files:
            with safe_open(parity / f"{name}.safetensors", "pt") as file:
                meta = file.metadata()
                loaded = {k: json.loads(meta[k]) for k in ("config", "no_grad", "zero_grad") if k in meta}
                tensors = {k: file.get_tensor(k) for k in file.keys()}
            flags = {k: v.bool() for k, v in tensors.items() if v.dtype == torch.uint8}
            files[name] = tensors | flags, loaded
        return files[name]

    return reader


@pytest.fixture(scope="session")
def forward(read: Callable[[str], tuple[Tensors, Any]]) -> Tensors:
    return read("forward")[0]


@pytest.fixture(scope="session")
def losses(read: Callable[[str], tuple[Tensors, Any]]) -> Tensors:
    return read("loss")[0]


@pytest.fixture(scope="session")
def rollouts(read: Callable[[str], tuple[Tensors, Any]]) -> Tensors:
    return read("sample")[0]


@pytest.fixture(scope="session")
def extras(read: Callable[[str], tuple[Tensors, Any]]) -> Tensors:
    return read("extras")[0]


def _expert(config: dict[str, Any]) -> ExpertConfig:
    return ExpertConfig(
        dim=config["hidden_dim"], ffn_dim=config["ffn_dim"], num_layers=config["num_layers"],
        num_heads=config["num_heads"], head_dim=config["attn_head_dim"], text_dim=config["text_dim"],
        freq_dim=config["freq_dim"], eps=config["eps"],
    )  # fmt: skip


def _built(state: Tensors, meta: dict[str, Any], sim: bool) -> WorldModel:
    video, action = meta["config"]["video"], meta["config"]["action"]
    config = WorldModelConfig(
        _expert(video),
        _expert(action),
        channels=video["in_dim"],
        patch=tuple(video["patch_size"]),
        action_dim=action["action_dim"],
        proprio_dim=state["proprio_encoder.weight"].shape[1],
        sim_condition=sim,
    )
    model = WorldModel(config)
    load_strictly(model, our_state(state), "the reference")
    return model.eval()


@pytest.fixture(scope="session")
def student(read: Callable[[str], tuple[Tensors, dict[str, Any]]]) -> WorldModel:
    tensors, meta = read("forward")
    return _built({k: v for k, v in tensors.items() if k.startswith(("mot.", "proprio_encoder."))}, meta, sim=True)


@pytest.fixture(scope="session")
def teacher(read: Callable[[str], tuple[Tensors, dict[str, Any]]]) -> WorldModel:
    """The stage-1 network. The file has no proprioception encoder of its own for it: the student's is used."""
    tensors, meta = read("teacher")
    mot = {k.removeprefix("teacher."): v for k, v in tensors.items() if k.startswith("teacher.mot.")}
    proprio = {k: v for k, v in read("forward")[0].items() if k.startswith("proprio_encoder.")}
    return _built(mot | proprio, meta, sim=False)
