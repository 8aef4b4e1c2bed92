"""Simulation latents into every video block, through projections that start at zero.

Legend: B batch, C channels, F latent frames, H W latent grid, S video tokens, D width, n conditioned samples.
"""

from dataclasses import dataclass, replace
from typing import cast

from jaxtyping import Float, Int
from torch import Tensor, nn

from simforcing.model.experts import patch_linear, patches


@dataclass(frozen=True)
class SimResiduals:
    """What is added to the tokens of each block; only samples that see their simulation have any."""

    values: list[Float[Tensor, "n S D"]]
    rows: Int[Tensor, " n"] | None = None  # which samples of the batch these are; None: all, in order

    def add(self, tokens: Float[Tensor, "B S D"], block: int) -> Float[Tensor, "B S D"]:
        """Tokens with the residuals of one block."""
        if self.rows is None:
            return tokens + self.values[block]
        return tokens.index_add(0, self.rows, self.values[block])

    def tokens(self, part: slice) -> "SimResiduals":
        """The residuals of some tokens."""
        return replace(self, values=[v[:, part] for v in self.values])


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

    def forward(self, sim_latents: Float[Tensor, "B C F H W"], gate: Float[Tensor, " B"] | None = None) -> SimResiduals:
        """Gate times projection, bias included; no gate means 1.

        The gate is 0 or 1 in training. Any other number is a soft condition: one pass instead of a guided pair.
        Samples whose gate is 0 are not projected, if the gate lies on the host (looking at it elsewhere would wait for
        the device).
        """
        rows = None
        latents = sim_latents.detach()
        if gate is not None and gate.device.type == "cpu" and not bool(gate.all()):
            host = gate.nonzero().flatten()
            gate, rows = gate[host], host.to(latents.device, non_blocking=True)
            latents = latents[rows]
        flat = patches(latents, self.patch).to(self.layers[0].weight.dtype)
        values = [patch_linear(flat, conv) for conv in self.layers]
        if gate is not None and not (gate.device.type == "cpu" and bool((gate == 1).all())):
            factor = gate.to(flat).view(-1, 1, 1)
            values = [factor * v for v in values]
        return SimResiduals(values, rows)
