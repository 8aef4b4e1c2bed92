"""What is watched during training, on held-out episodes.

Legend: B batch, C channels, F latent frames, H W latent grid, A actions.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from simforcing.data.windows import other_episodes
from simforcing.model.flow import noised
from simforcing.model.world_model import WorldModel
from simforcing.train.batches import LatentClips
from simforcing.train.objective import Batch, flow_error

LEVELS = (0.3, 0.6, 0.9)  # noise levels
_CLIPS = 96


def exchanged(clips: LatentClips, rows: Int64[Tensor, " B"]) -> Float[Tensor, "B A a"]:
    """For each of these clips the actions of one of another episode.

    Where one episode has more than half of them, some get those of another clip of their own episode.
    """
    other = torch.from_numpy(other_episodes(clips.episode[rows].numpy()))
    return clips.action[rows[other]]


def validation(clips: LatentClips, seed: int = 0) -> Callable[[WorldModel], dict[str, float]]:
    """A function of a model: flow error per noise level, and the action ratio, on fixed clips and noise.

    action_ratio: error with exchanged actions over error with the true ones. Near 1, the model ignores its actions.
    Of pairs, these are about the real video without its simulation; a model with a simulation condition also gets
    flow_real_on (real video under its paired simulation) and flow_sim (simulated video), means over the levels.
    """
    rows = torch.linspace(0, len(clips) - 1, min(len(clips), _CLIPS)).long()
    batch = clips.take(rows)
    wrong = batch._replace(action=exchanged(clips, rows))
    noise = torch.randn(batch.latents.shape, generator=torch.Generator().manual_seed(seed))

    def run(model: WorldModel) -> dict[str, float]:
        right = [_error(model, batch, noise, level) for level in LEVELS]
        swapped = [_error(model, wrong, noise, level) for level in LEVELS]
        result = {f"flow_{level}": round(e, 5) for level, e in zip(LEVELS, right, strict=True)}
        result |= {"action_ratio": round(sum(swapped) / sum(right), 4)}
        if batch.sim_latents is None or model.sim is None:
            return result
        on = [_error(model, batch, noise, level, batch.sim_latents) for level in LEVELS]
        sim = [_error(model, batch.simulated(), noise, level) for level in LEVELS]
        return result | {f"flow_{n}": round(sum(e) / len(e), 5) for n, e in (("real_on", on), ("sim", sim))}

    return run


@torch.no_grad()
def _error(
    model: WorldModel,
    batch: Batch,
    noise: Float[Tensor, "B C F H W"],
    level: float,
    sim: Float[Tensor, "B C F H W"] | None = None,
) -> float:
    sigma = torch.full((len(noise),), level)
    x = noised(batch.latents, noise, sigma)
    x[:, :, 0] = batch.latents[:, :, 0]
    context, mask = model.context(batch.text, batch.text_mask, batch.proprio)
    condition = model.condition(batch.action, context, mask, x.shape[2], sim)
    velocity = model.denoise(x, model.flow.train_steps * sigma, condition)
    return float(flow_error(velocity, batch.latents, noise).mean())
