"""The denoising step compiles as one graph, equals the eager one, and is compiled once for all steps."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from simforcing.model.experts import ExpertConfig
from simforcing.model.mixture import Condition, stacked
from simforcing.model.sim_condition import SimResiduals
from simforcing.model.world_model import WorldModel, WorldModelConfig

SIZES = {"num_layers": 2, "num_heads": 2, "head_dim": 12, "text_dim": 8, "freq_dim": 16}
BACKENDS = [
    ("eager", False),
    pytest.param("aot_eager", True, marks=pytest.mark.slow),
    pytest.param("inductor", True, marks=pytest.mark.slow),
]
CONFIG = WorldModelConfig(ExpertConfig(24, 48, **SIZES), ExpertConfig(16, 32, **SIZES), channels=3)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing compiled before or after; inductor's workers in this process."""
    torch.compiler.reset()
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch.compiler.reset()


@pytest.fixture
def model() -> WorldModel:
    torch.manual_seed(0)
    found = WorldModel(CONFIG)
    assert found.sim is not None
    with torch.no_grad():
        for parameter in found.sim.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    return found


def prepared(model: WorldModel, masked: bool, gate: Tensor | None = None) -> tuple[Tensor, Condition]:
    g = torch.Generator().manual_seed(1)
    latents, sim = torch.randn(2, 2, 3, 3, 4, 4, generator=g)
    mask = torch.tensor([[True, True, False], [True, True, True]]) if masked else None
    action, context = torch.randn(2, 8, 7, generator=g), torch.randn(2, 3, 8, generator=g)
    return latents, model.condition(action, context, mask, latents.shape[2:], sim, gate)


def rollout(model: WorldModel, step: Callable[..., Tensor], masked: bool) -> Tensor:
    """Five guided steps that remember the first frame; both branches in one batch."""
    latents, condition = prepared(model, masked)
    assert condition.sim is not None
    plain = replace(condition, sim=None)
    branches = stacked([plain, plain], SimResiduals(condition.sim.values, torch.tensor([2, 3])))
    ready = model.remember_first(latents[:, :, :1], branches)
    x = latents[:, :, 1:].contiguous()
    timesteps, deltas = model.flow.steps(5)
    for i, delta in enumerate(deltas.tolist()):
        off, on = step(x, timesteps[i : i + 1], ready).chunk(2)
        x = x + delta * (off + 0.6 * (on - off))
    return x


def training(model: WorldModel, step: Callable[..., Tensor], masked: bool) -> dict[str, Any]:
    """Two losses at other times, and the gradients of the second."""
    latents, condition = prepared(model, masked, torch.tensor([1.0, 0.0]))
    step(latents, torch.tensor([100.0, 200.0]), condition)
    model.zero_grad()
    velocity = step(latents, torch.tensor([400.0, 730.0]), condition)
    velocity.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"velocity": velocity.detach(), **gradients}


@pytest.mark.parametrize(("backend", "masked"), BACKENDS)
def test_a_rollout_compiles_one_graph_once(model: WorldModel, backend: str, masked: bool) -> None:
    counter = CompileCounterWithBackend(backend)
    with torch.inference_mode():
        compiled = torch.compile(model.denoise, backend=counter, fullgraph=True, dynamic=False)
        found, expected = (rollout(model, step, masked) for step in (compiled, model.denoise))
    assert counter.frame_count == 1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("backend", "masked"), BACKENDS[:2])
def test_a_training_step_compiles_one_graph_once(model: WorldModel, backend: str, masked: bool) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model.denoise, backend=counter, fullgraph=True, dynamic=False)
    found = training(model, compiled, masked)
    assert counter.frame_count == 1
    expected = training(model, model.denoise, masked)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4, msg=name)
