"""The flow-matching schedule, in its one home: times, noise levels, weights, sampling steps.

Legend: B batch, n sampling steps. `u` in [0, 1) is uniform; sigma in [0, 1] is the noise level, 1 = pure noise;
`timestep` = 1000 sigma is what the networks are given. All of them are float32 whatever the weights' dtype.

A noisy latent is x = (1 - sigma) x0 + sigma e, its velocity e - x0, hence x0 = x - sigma v. (SimForcing, flow
matching with the shifted schedule of Wan2.2; training weight: a bell around t = 500 that is zero at both ends.)
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from simforcing.errors import InputError


class Steps(NamedTuple):
    """Euler steps from noise to data: x <- x + velocity * delta at each timestep."""

    timesteps: Float32[Tensor, " n"]
    deltas: Float32[Tensor, " n"]


@dataclass(frozen=True)
class Flow:
    """A shifted linear schedule. `shift` > 1 spends more of the time at high noise."""

    shift: float = 5.0
    train_steps: int = 1000

    def sigma(self, u: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Noise level of a uniform number: shift u / (1 + (shift - 1) u)."""
        return self.shift * u / (1 + (self.shift - 1) * u)

    def timestep(self, u: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Timestep in [0, train_steps] of a uniform number."""
        return self.train_steps * self.sigma(u)

    @cached_property
    def _bell(self) -> tuple[float, float]:
        """Minimum and mean height of the bell over the training grid, in float64."""
        u = 1 - torch.arange(self.train_steps, dtype=torch.float64) / self.train_steps
        height = self._height(self.timestep(u))
        low = height.min()
        return float(low), float((height - low).mean())

    def _height(self, timestep: Tensor) -> Tensor:
        return torch.exp(-2 * ((timestep - self.train_steps / 2) / self.train_steps) ** 2)

    def weight(self, timestep: Float[Tensor, "..."]) -> Float32[Tensor, "..."]:
        """Training weight: 0 at both ends, about 2.08 in the middle, mean 1 over the shifted grid."""
        low, mean = self._bell
        return (self._height(timestep.float()) - low) / (mean + 1e-10)

    def steps(self, n: int, rounded: torch.dtype = torch.float32) -> Steps:
        """`n` Euler steps; the last one ends at noise level 0 exactly, unless they are rounded to another dtype.

        The released code rounds to the weights' dtype: in bfloat16 ten steps sum to -0.99976.

        Raises:
            InputError: n < 1.
        """
        if n < 1:
            raise InputError(f"{n} sampling steps: at least 1 is needed")
        sigma = self.sigma(torch.linspace(1, 0, n + 1, dtype=torch.float32))
        timesteps, deltas = self.train_steps * sigma[:-1], sigma.diff()
        return Steps(timesteps.to(rounded).float(), deltas.to(rounded).float())


def noised(
    clean: Float[Tensor, "B *rest"], noise: Float[Tensor, "B *rest"], sigma: Float32[Tensor, " B"]
) -> Float[Tensor, "B *rest"]:
    """(1 - sigma) clean + sigma noise, one noise level a sample."""
    level = sigma.view(-1, *[1] * (clean.ndim - 1)).to(clean.dtype)
    return torch.lerp(clean, noise, level)
