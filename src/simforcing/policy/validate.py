"""What is watched while a policy trains, on held-out episodes.

Legend: B batch, A action steps, a action numbers.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from simforcing.policy.data import PolicyClips
from simforcing.policy.objective import Batch, Draws, PolicyObjective, action_error, predicted, video_error
from simforcing.policy.policy import Policy
from simforcing.policy.sampler import Observation, SamplerConfig, remember, sample, start_noise
from simforcing.policy.settings import PolicyLoss
from simforcing.train.loop import clip_generator, moved
from simforcing.train.parallel import Team, whole
from simforcing.train.validate import LEVELS, chosen, shared_means

SAMPLED = 32
"""Held-out windows whose actions are sampled."""

PARTS = {"position": slice(0, 3), "rotation": slice(3, -1), "gripper": slice(-1, None)}
"""Numbers of an action that begins with a position and ends with a gripper."""


def validation(
    clips: PolicyClips,
    objective: PolicyObjective,
    sampler: SamplerConfig = SamplerConfig(),
    seed: int = 0,
    team: Team = Team(),
) -> Callable[[Policy], dict[str, float]]:
    """A function of a policy: losses a noise level, and the error of sampled actions, on fixed windows and noise.

    action_0.3, ...: mean squared velocity error of actions at that noise level; of video too, where the objective has
    it. Video and actions are equally noisy, as in sampling; the video that an `idm` policy looks at is clean.
    flow: mean of the action errors; what a run's best checkpoint is chosen by.
    action_error: mean absolute error of sampled actions, in the units of the recordings, over all steps that are not
    padded; action_error_position, _rotation, _gripper: of these numbers.

    The processes of a team share the windows, and all must call the function.
    """
    rows = chosen(clips)
    some = rows[torch.linspace(0, len(rows) - 1, min(len(rows), SAMPLED)).long()]

    def run(policy: Policy) -> dict[str, float]:
        errors = shared_means(partial(_losses, policy, clips, rows, objective, seed), len(rows), team)
        result = {name: round(value, 5) for name, value in errors.items()}
        result["flow"] = round(sum(errors[f"action_{level}"] for level in LEVELS) / len(LEVELS), 5)
        return result | _sampled(policy, clips.take(some), sampler, team)

    return run


def _losses(
    policy: Policy, clips: PolicyClips, rows: Tensor, objective: PolicyObjective, seed: int, some: Tensor
) -> dict[str, Float[Tensor, " B"]]:
    """Errors of some of these rows, at every level."""
    batch = clips.take(rows[some])
    drawn = PolicyLoss(objective).draw(policy, batch, [clip_generator(seed, int(i)) for i in some])
    found: dict[str, Tensor] = {}
    for level in LEVELS:
        time = torch.full((len(some),), level * policy.flow.train_steps)
        clean = None if drawn.watched_timestep is None else torch.zeros_like(time)
        draws = drawn._replace(timestep=time, action_timestep=time, watched_timestep=clean)
        errors = policy.run(_errors, moved(batch, policy.device), moved(draws, policy.device), objective)
        found |= {f"{name}_{level}": error for name, error in errors.items()}
    return found


def _errors(policy: Policy, batch: Batch, draws: Draws, objective: PolicyObjective) -> dict[str, Float[Tensor, " B"]]:
    found = predicted(policy, batch, draws, objective)
    errors = {"action": action_error(found.action, batch.action, draws.action_noise, batch.action_padded)}
    if found.video is not None:
        errors["video"] = video_error(found.video, batch.latents, draws.noise, batch.padded)
    return errors


def _sampled(policy: Policy, batch: Batch, config: SamplerConfig, team: Team) -> dict[str, float]:
    """Of actions sampled by the main process; sharded weights are gathered there first."""
    if team.kind == "fsdp":
        policy = whole(policy, team)
        if team.main:
            policy = policy.to(team.device)
    return team.on_main(lambda: _action_errors(policy, batch, policy.run(_actions, batch, config).cpu()))


@torch.inference_mode()
def _actions(policy: Policy, batch: Batch, config: SamplerConfig) -> Float[Tensor, "B A a"]:
    first = batch.latents[:, :, :1]
    noise = start_noise(policy, first, range(len(first)), video=policy.config.variant != "first-frame")
    memory = remember(policy, Observation(first, batch.text, batch.text_mask, batch.proprio))
    return sample(policy, memory, noise, config).action


def _action_errors(policy: Policy, batch: Batch, found: Float[Tensor, "B A a"]) -> dict[str, float]:
    assert policy.preparation is not None and batch.action_padded is not None
    stats = policy.preparation.action_stats
    ours, true = (torch.from_numpy(stats.denormalize(x.numpy())) for x in (found, batch.action))
    off = (ours - true).abs()[~batch.action_padded]
    errors = {"action_error": off}
    if off.shape[1] > PARTS["position"].stop + 1:
        errors |= {f"action_error_{name}": off[:, part] for name, part in PARTS.items()}
    return {name: float(f"{float(error.mean()):.5g}") for name, error in errors.items()}
