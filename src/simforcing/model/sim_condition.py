"""Simulation latents into every video block, through projections that start at zero.

Legend: B batch, C channels, F latent frames, H W latent grid, S video tokens, D width.
"""

from typing import cast

from jaxtyping import Float
from torch import Tensor, nn

from simforcing.model.experts import patch_linear, patches


class SimCondition(nn.Module):
    """One patch projection a block. With zero weights (the start) the model is exactly the unconditioned one."""

    def __init__(self, num_layers: int, channels: int, dim: int, patch: tuple[int, int, int]) -> None:
        super().__init__()
        self.patch = patch
        self.blocks = nn.ModuleList(
            [nn.Conv3d(channels, dim, kernel_size=patch, stride=patch) for _ in range(num_layers)]
        )
        for conv in self.layers:
            nn.init.zeros_(conv.weight)
            if conv.bias is not None:
                nn.init.zeros_(conv.bias)

    @property
    def layers(self) -> list[nn.Conv3d]:
        """The projections in order."""
        return cast(list[nn.Conv3d], list(self.blocks))

    def forward(
        self, sim_latents: Float[Tensor, "B C F H W"], gate: Float[Tensor, " B"] | None = None
    ) -> list[Float[Tensor, "B S D"]]:
        """What is added in each block: gate times the projection, bias included; no gate means 1.

        The gate is 0 or 1 in training. Any other number is a soft condition: one pass instead of a guided pair.
        """
        flat = patches(sim_latents.detach(), self.patch)
        residuals = [patch_linear(flat, conv) for conv in self.layers]
        if gate is None:
            return residuals
        factor = gate.to(flat.dtype).view(-1, 1, 1)
        return [factor * r for r in residuals]
