"""What is watched during training, on held-out episodes.

Legend: B batch, C channels, F latent frames, H W latent grid, A actions.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from simforcing.data.windows import other_episodes
from simforcing.model.flow import noised
from simforcing.model.world_model import WorldModel
from simforcing.train.batches import Clips, LatentClips
from simforcing.train.objective import Batch, flow_error
from simforcing.train.parallel import Team

LEVELS = (0.3, 0.6, 0.9)  # noise levels
_CLIPS, _TOGETHER = 96, 32


def exchanged(clips: LatentClips, rows: Int64[Tensor, " B"]) -> Float[Tensor, "B A a"]:
    """For each of these clips the actions of one of another episode.

    Where one episode has more than half of them, some get those of another clip of their own episode.
    """
    other = torch.from_numpy(other_episodes(clips.episode[rows].numpy()))
    return clips.action[rows[other]]


def validation(clips: LatentClips, seed: int = 0, team: Team = Team()) -> Callable[[WorldModel], dict[str, float]]:
    """A function of a model: flow error per noise level, and the action ratio, on fixed clips and noise.

    flow: mean over the levels, with and without simulation where the model has that condition; what a run's best
    checkpoint is chosen by. action_ratio: error with exchanged actions over error with the true ones; near 1, the model
    ignores its actions. Of pairs, the others are about the real video without its simulation; a model with a simulation
    condition also gets flow_real_on (real video under its paired simulation) and flow_sim (simulated video).

    The processes of a team share the clips, and all must call the function.
    """
    rows = chosen(clips)
    swapped = exchanged(clips, rows)
    noise = torch.randn(
        (len(rows), *clips.take(rows[:1]).latents.shape[1:]), generator=torch.Generator().manual_seed(seed)
    )

    def run(model: WorldModel) -> dict[str, float]:
        def errors(i: Tensor) -> dict[str, Tensor]:
            batch = clips.take(rows[i])
            right, wrong = (b.to(model.device) for b in (batch, batch._replace(action=swapped[i])))
            return model.run(_errors, right, wrong, noise[i].to(model.device))

        return _summary(shared_means(errors, len(rows), team))

    return run


def chosen(clips: Clips[Any], count: int = _CLIPS) -> Int64[Tensor, " B"]:
    """Rows of clips to look at, evenly apart, all where there are no more than `count`."""
    return torch.linspace(0, len(clips) - 1, min(len(clips), count)).long()


def shared_means(
    errors: Callable[[Int64[Tensor, " B"]], dict[str, Float[Tensor, " B"]]], count: int, team: Team
) -> dict[str, float]:
    """Means over clips 0..count-1 of what `errors` finds of some of them; the processes of a team share the work."""
    share = -(-count // team.size)  # equal for all, since sharded models are called together
    mine = torch.arange(team.rank, share * team.size, team.size)
    sums: dict[str, Tensor] = {}
    for i in mine.split(_TOGETHER):
        for name, error in errors(i.clamp(max=count - 1)).items():
            sums[name] = sums.get(name, torch.zeros(())) + (error.cpu() * (i < count)).sum()
    values = team.sum(torch.stack(list(sums.values()))) / count
    return dict(zip(sums, values.tolist(), strict=True))


def _errors(
    model: WorldModel, batch: Batch, wrong: Batch, noise: Float[Tensor, "B C F H W"]
) -> dict[str, Float[Tensor, " B"]]:
    """Of every clip, at every level."""
    ways: dict[str, tuple[Batch, Tensor | None]] = {"flow": (batch, None), "swapped": (wrong, None)}
    if batch.sim_latents is not None and model.sim is not None:
        ways |= {"real_on": (batch, batch.sim_latents), "sim": (batch.simulated(), None)}
    return {
        f"{name}_{level}": _error(model, inputs, noise, level, sim)
        for name, (inputs, sim) in ways.items()
        for level in LEVELS
    }


def _summary(errors: dict[str, float]) -> dict[str, float]:
    def mean(name: str) -> float:
        return sum(errors[f"{name}_{level}"] for level in LEVELS) / len(LEVELS)

    result = {f"flow_{level}": round(errors[f"flow_{level}"], 5) for level in LEVELS}
    result["action_ratio"] = round(mean("swapped") / mean("flow"), 4)
    if f"sim_{LEVELS[0]}" not in errors:
        return result | {"flow": round(mean("flow"), 5)}
    both = {f"flow_{name}": round(mean(name), 5) for name in ("real_on", "sim")}
    return result | both | {"flow": round((mean("flow") + mean("real_on")) / 2, 5)}


@torch.no_grad()
def _error(
    model: WorldModel,
    batch: Batch,
    noise: Float[Tensor, "B C F H W"],
    level: float,
    sim: Float[Tensor, "B C F H W"] | None = None,
) -> Float[Tensor, " B"]:
    sigma = torch.full((len(noise),), level, device=noise.device)
    x = noised(batch.latents, noise, sigma)
    x[:, :, 0] = batch.latents[:, :, 0]
    context, mask = model.context(batch.text, batch.text_mask, batch.proprio)
    condition = model.condition(batch.action, context, mask, x.shape[2:], sim)
    velocity = model.denoise(x, model.flow.train_steps * sigma, condition)
    return flow_error(velocity, batch.latents, noise)
