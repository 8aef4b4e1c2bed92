"""How much a recipe computes: floating-point operations, counted while its networks run on the meta device.

A multiply-add is two operations; matrix products, convolutions and attention are counted, as everybody does. Seconds
follow from what a GPU sustains, which nothing here knows.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from simforcing.train.memory import Memory


def forward(need: Memory, with_simulation: bool = False) -> int:
    """One forward pass of one clip through both experts; with its simulation projected into every block."""
    latents, action, context = _inputs(need)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        sim = latents if with_simulation else None
        condition = need.student.condition(action, context, None, latents.shape[2:], sim, None)
        need.student.denoise(latents, torch.zeros(1, device="meta"), condition, True)
    return int(counter.get_total_flops())


def encoding(need: Memory) -> int:
    """The latents of one window, both domains."""
    rule = need.recipe.rule
    video = torch.zeros(1, 3, rule.frames, rule.height, rule.width, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        need.codec.encode(video)
    return 2 * int(counter.get_total_flops())


def training(need: Memory) -> dict[str, int]:
    """Operations a clip; of a student a pair: the real clip, its share of simulated ones and the frozen teacher.

    A backward pass takes twice its forward; with recomputed blocks a forward more.
    """
    plain, conditioned = forward(need), forward(need, with_simulation=True)
    pairs, through = need.clips("student")
    student = conditioned + (through - pairs) / pairs * plain
    return {
        "a clip forward": plain,
        "a clip of a teacher or baseline": 3 * plain,
        "the same, blocks recomputed": 4 * plain,
        "a pair of a student": round(3 * student + plain),
        "a pair, blocks recomputed": round(4 * student + plain),
        "encoding a window": encoding(need),
    }


def _inputs(need: Memory) -> tuple[Tensor, Tensor, Tensor]:
    """Latents [1, C, F, H, W], actions [1, A, 7] and context [1, L, X] without numbers."""
    rule, shapes = need.recipe.rule, need.shapes
    shape = need.codec.latent_shape(rule.frames, rule.height, rule.width)
    with torch.device("meta"):
        return (
            torch.zeros(1, *shape),
            torch.zeros(1, shapes.actions, 7),
            torch.zeros(1, shapes.context, need.recipe.video.text_dim),
        )
