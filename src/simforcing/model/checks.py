"""What the network refuses, before it computes: shapes and values at its public borders.

Legend: B batch, C channels, F latent frames, H W latent grid, A action steps, a action numbers, L context tokens,
X text width.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtyping import Bool, Float
from torch import Tensor

from simforcing.errors import InputError, check_shape

if TYPE_CHECKING:
    from simforcing.model.world_model import WorldModelConfig


def check_inputs(
    config: "WorldModelConfig",
    latents: Sequence[int],
    action: Float[Tensor, "B A a"] | None,
    context: Float[Tensor, "B L X"],
    context_mask: Bool[Tensor, "B L"] | None,
    name: str = "context",
) -> None:
    """Compares inputs with the model's sizes and each other. Looks at values, so it waits for the device.

    name: what the caller calls the context.

    Raises:
        InputError: names the argument, what it is and what it must be.
    """
    if len(latents) != 5 or latents[1] != config.channels:
        raise InputError(f"latents have shape {list(latents)}, they must be [B, {config.channels}, F, H, W]")
    batch, _, *grid = latents
    if any(n < 1 or n % p for n, p in zip(grid, config.patch, strict=True)):
        raise InputError(
            f"latents have F, H, W = {grid}, they must be multiples of the patch {list(config.patch)}; choose a video "
            "size that is a multiple of the codec's stride times the patch"
        )
    check_shape(name, context, [batch, "L", config.video.text_dim])
    if context_mask is not None:
        check_shape(f"{name}_mask", context_mask, [batch, context.shape[1]])
        blind = (~context_mask.any(dim=1)).nonzero().flatten().tolist()
        if blind:
            raise InputError(
                f"{name}_mask of shape {list(context_mask.shape)} hides every token of sample {blind[0]}, it must "
                "leave at least one True in each"
            )
    if action is None:
        return
    check_shape("action", action, [batch, "A", config.action_dim])
    steps, transitions = action.shape[1], grid[0] // config.patch[0] - 1
    if steps == 0 or (transitions and steps % transitions):
        raise InputError(
            f"action has shape {list(action.shape)}: {steps} steps, they must be a multiple of the {transitions} "
            "transitions between latent frames"
        )
    if not bool(action.isfinite().all()):
        raise InputError(f"action of shape {list(action.shape)} holds NaN or infinite values, it must be finite")
