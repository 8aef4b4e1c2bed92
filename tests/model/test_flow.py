"""The schedule against the reference numbers, and its end points."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.model.flow import Flow, noised


@pytest.fixture(scope="module")
def losses(parity: Path) -> dict[str, Tensor]:
    return {k: v for k, v in load_file(parity / "loss.safetensors").items() if k.startswith("sched.")}


@pytest.fixture(scope="module")
def samples(parity: Path) -> dict[str, Tensor]:
    return load_file(parity / "sample.safetensors")


def test_training_weight_equals_the_reference(losses: dict[str, Tensor]) -> None:
    weight = Flow().weight(losses["sched.t"])
    torch.testing.assert_close(weight, losses["sched.training_weight"], atol=1e-6, rtol=1e-5)


def test_timestep_of_a_uniform_number_equals_the_reference(losses: dict[str, Tensor]) -> None:
    torch.testing.assert_close(Flow().timestep(losses["sched.u"]), losses["sched.phi_u_x1000"], atol=1e-4, rtol=1e-6)


def test_weight_is_the_bell_less_its_minimum_over_its_mean(losses: dict[str, Tensor]) -> None:
    low, mean = losses["sched.ymin_norm"].tolist()
    t = torch.linspace(0, 1000, 41)
    bell = torch.exp(-2 * ((t.double() - 500) / 1000) ** 2)
    torch.testing.assert_close(Flow().weight(t).double() * mean + low, bell, atol=1e-6, rtol=0)


def test_weight_is_zero_at_both_ends_and_one_on_average_of_the_grid() -> None:
    flow = Flow()
    torch.testing.assert_close(flow.weight(torch.tensor([0.0, 1000.0])), torch.zeros(2), atol=1e-6, rtol=0)
    assert float(flow.weight(torch.tensor(500.0))) == pytest.approx(2.0764, abs=1e-4)
    grid = flow.timestep(1 - torch.arange(1000, dtype=torch.float64) / 1000)
    assert float(flow.weight(grid).mean()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.float32])
def test_weight_is_float32_whatever_it_is_given(kind: torch.dtype) -> None:
    assert Flow().weight(torch.tensor([500.0], dtype=kind)).dtype == torch.float32


@pytest.mark.parametrize("n", [1, 2, 4, 5, 10, 20])
def test_sampling_steps_equal_the_reference(samples: dict[str, Tensor], n: int) -> None:
    timesteps, deltas = Flow().steps(n)
    torch.testing.assert_close(timesteps, samples[f"sched.{n}.timesteps"], atol=1e-3, rtol=1e-6)
    torch.testing.assert_close(deltas, samples[f"sched.{n}.deltas"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("n", [1, 3, 7, 50])
def test_sampling_starts_at_pure_noise_and_ends_at_none(n: int, shift: float) -> None:
    timesteps, deltas = Flow(shift=shift).steps(n)
    assert timesteps.dtype == deltas.dtype == torch.float32
    assert float(timesteps[0]) == 1000
    assert bool((deltas < 0).all())
    # where the last step starts is where it goes to zero from: nothing is left
    assert float(timesteps[-1] / 1000 + deltas[-1]) == pytest.approx(0, abs=1e-7)
    assert float(deltas.sum()) == pytest.approx(-1, abs=1e-6)


def test_without_shift_the_steps_are_even() -> None:
    torch.testing.assert_close(Flow(shift=1.0).steps(4).deltas, torch.full((4,), -0.25))


@pytest.mark.parametrize("n", [0, -3])
def test_fewer_than_one_step_is_refused(n: int) -> None:
    with pytest.raises(SimForcingError, match=f"{n} sampling steps"):
        Flow().steps(n)


def test_noise_level_is_monotone_between_zero_and_one() -> None:
    sigma = Flow().sigma(torch.linspace(0, 1, 101))
    assert float(sigma[0]) == 0
    assert float(sigma[-1]) == 1
    assert bool((sigma.diff() > 0).all())
    assert float(Flow().sigma(torch.tensor(0.5))) == pytest.approx(5 / 6)


def test_noised_is_clean_at_zero_noise_at_one_and_gives_the_clean_back_in_between() -> None:
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 3, 4, 2, 5, 5, generator=generator)
    sigma = torch.tensor([0.0, 1.0, 0.3])
    x = noised(clean, noise, sigma)
    assert torch.equal(x[0], clean[0])
    assert torch.equal(x[1], noise[1])
    torch.testing.assert_close(x[2], 0.7 * clean[2] + 0.3 * noise[2])
    torch.testing.assert_close(x - sigma.view(-1, 1, 1, 1, 1) * (noise - clean), clean, atol=1e-6, rtol=0)
