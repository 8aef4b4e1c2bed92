"""What is watched during training, on held-out episodes.

Legend: B batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from simforcing.model.flow import noised
from simforcing.model.world_model import WorldModel
from simforcing.train.batches import LatentClips
from simforcing.train.objective import Batch, flow_error

LEVELS = (0.3, 0.6, 0.9)  # noise levels
_CLIPS = 96


def exchanged(clips: LatentClips, rows: Tensor) -> Tensor:
    """For each of these clips the action rows of another clip, one of another episode where there is one."""
    half = max(len(rows) // 2, 1)
    other = rows.roll(half)
    return clips.action[other]


def validation(clips: LatentClips, seed: int = 0) -> Callable[[WorldModel], dict[str, float]]:
    """A function of a model: flow error per noise level, and the action ratio, on fixed clips and noise.

    action_ratio: error with exchanged actions over error with the true ones. Near 1, the model ignores its actions.
    """
    rows = torch.linspace(0, len(clips) - 1, min(len(clips), _CLIPS)).long()
    batch = clips.take(rows)
    wrong = batch._replace(action=exchanged(clips, rows))
    noise = torch.randn(batch.latents.shape, generator=torch.Generator().manual_seed(seed))

    def run(model: WorldModel) -> dict[str, float]:
        right = [_error(model, batch, noise, level) for level in LEVELS]
        swapped = [_error(model, wrong, noise, level) for level in LEVELS]
        result = {f"flow_{level}": round(e, 5) for level, e in zip(LEVELS, right, strict=True)}
        return result | {"action_ratio": round(sum(swapped) / sum(right), 4)}

    return run


@torch.no_grad()
def _error(model: WorldModel, batch: Batch, noise: Tensor, level: float) -> float:
    sigma = torch.full((len(noise),), level)
    x = noised(batch.latents, noise, sigma)
    x[:, :, 0] = batch.latents[:, :, 0]
    context, mask = model.context(batch.text, batch.text_mask, batch.proprio)
    condition = model.condition(batch.action, context, mask, x.shape[2])
    velocity = model.denoise(x, model.flow.train_steps * sigma, condition)
    return float(flow_error(velocity, batch.latents, noise).mean())
