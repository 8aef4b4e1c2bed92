"""The schedule: its end points, what it averages to, and its precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simforcing.errors import SimForcingError
from simforcing.model.flow import Flow, noised


def test_weight_is_zero_at_both_ends_and_one_on_average_of_the_grid() -> None:
    flow = Flow()
    torch.testing.assert_close(flow.weight(torch.tensor([0.0, 1000.0])), torch.zeros(2), atol=1e-6, rtol=0)
    assert float(flow.weight(torch.tensor(500.0))) == pytest.approx(2.0764, abs=1e-4)
    grid = flow.timestep(1 - torch.arange(1000, dtype=torch.float64) / 1000)
    assert float(flow.weight(grid).mean()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.float32])
def test_weight_is_float32_whatever_it_is_given(kind: torch.dtype) -> None:
    assert Flow().weight(torch.tensor([500.0], dtype=kind)).dtype == torch.float32


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 200), shift=st.floats(1.0, 12.0))
def test_sampling_starts_at_pure_noise_and_ends_at_none(n: int, shift: float) -> None:
    timesteps, deltas = Flow(shift=shift).steps(n)
    assert timesteps.dtype == deltas.dtype == torch.float32
    assert float(timesteps[0]) == pytest.approx(1000, abs=1e-3)
    assert bool((deltas < 0).all())
    # where the last step starts is where it goes to zero from: nothing is left
    assert float(timesteps[-1] / 1000 + deltas[-1]) == pytest.approx(0, abs=1e-7)
    assert float(deltas.sum()) == pytest.approx(-1, abs=1e-6)


def test_steps_rounded_to_bfloat16_do_not_add_up() -> None:
    """Why they are float32: what the released code rounds to stops short of the clean video."""
    timesteps, deltas = Flow().steps(10, torch.bfloat16)
    assert timesteps.dtype == deltas.dtype == torch.float32
    assert float(deltas.double().sum()) == pytest.approx(-0.99976, abs=1e-5)
    error = (timesteps - Flow().steps(10).timesteps).abs().max()
    assert 1 < float(error) < 2


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
