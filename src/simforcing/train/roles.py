"""Teacher, student and baselines: what each starts from and what it minimises."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from simforcing.data.cache import read_cache, read_header
from simforcing.data.episode import ActionConvention
from simforcing.data.stats import Normalizer
from simforcing.data.windows import ClipRule, load_split
from simforcing.errors import SimForcingError
from simforcing.model.codec import load_codec
from simforcing.model.preparation import Preparation
from simforcing.model.world_model import WorldModel, WorldModelConfig, load_strictly
from simforcing.train.batches import LatentClips, from_cache
from simforcing.train.loop import Loss
from simforcing.train.objective import Batch, ObjectiveConfig, draw, single_domain_loss, student_loss
from simforcing.train.recipe import Recipe, Role

DOMAINS: dict[Role, tuple[Literal["real", "sim"], ...]] = {
    "teacher": ("sim",),
    "student": ("real", "sim"),
    "baseline": ("real",),
}


def new_preparation(found: Recipe, header: dict[str, Any], action: np.ndarray, state: np.ndarray) -> Preparation:
    """What a model trained from scratch on these rows is prepared with."""
    convention = header["action"]
    return Preparation(
        action_stats=Normalizer.fit(action.reshape(-1, action.shape[-1])),
        state_stats=Normalizer.fit(state.reshape(-1, state.shape[-1])),
        rule=ClipRule(**header["rule"]),
        action=ActionConvention(**convention | {"gripper_range": tuple(convention["gripper_range"])}),
        codec=found.codec,
        codec_identity=header["codec"],
        text=found.text,
        text_length=found.text_length,
        text_pooling=found.text_pooling,
    )


def new_model(found: Recipe, preparation: Preparation, channels: int, seed: int) -> WorldModel:
    """A model with fresh weights."""
    torch.manual_seed(seed)
    config = WorldModelConfig(
        video=found.video,
        action=found.action,
        channels=channels,
        action_dim=len(preparation.action_stats.min),
        proprio_dim=len(preparation.state_stats.min),
        action_positions=found.action_positions,
        sim_condition=False,
    )
    return WorldModel(config, preparation)


class Data:
    """An encoded dataset with its split."""

    def __init__(self, cache: Path, split: Path, found: Recipe) -> None:
        self.header = read_header(cache)
        self.arrays = read_cache(cache, {"rule": asdict(found.rule), "codec": load_codec(found.codec).identity})
        self.split = load_split(split)
        self.channels = int(self.header["codec"]["channels"])
        for part in ("train", "val"):
            if not self.split.get(part):
                raise SimForcingError(f"{split} has no episodes in part '{part}'; train and val are needed")

    def preparation(self, found: Recipe) -> Preparation:
        """Statistics of the training episodes: of all their rows, or of the encoded windows in a cache without them."""
        train = np.isin(self.arrays["episode"], self.split["train"])

        def rows(name: str, windows: str) -> np.ndarray:
            names = [f"{name}_min", f"{name}_max"]
            whole = all(n in self.arrays for n in names)
            return np.concatenate([self.arrays[n][train] for n in (names if whole else [windows])])

        return new_preparation(found, self.header, rows("action", "action"), rows("state", "proprio"))

    def clips(self, preparation: Preparation, part: str) -> LatentClips:
        """The clips of one part of the split, prepared for a model."""
        return from_cache(self.arrays, self.header["tasks"], preparation).only(self.split[part])

    def parts(self, preparation: Preparation, role: Role) -> tuple[LatentClips, LatentClips]:
        """Clips to train and to validate this role on, with the latents that it looks at.

        Raises:
            SimForcingError: the cache lacks latents that the role needs, or a part has no clips.
        """
        needed = DOMAINS[role]
        if lacking := [d for d in needed if d not in self.arrays]:
            raise SimForcingError(
                f"a {role} needs {' and '.join(needed)} latents, the cache has no {' and '.join(lacking)}; encode a "
                "paired dataset ('simforcing twin pair')"
            )
        train, val = (self.clips(preparation, part) for part in ("train", "val"))
        if len(needed) == 2:
            return train, val
        return train.one_domain(needed[0]), val.one_domain(needed[0])


def check_fits(model: WorldModel, header: dict[str, Any], where: str) -> None:
    """Refuses a model that was made for other latents, clips or actions.

    Raises:
        SimForcingError: names what differs.
    """
    prepared = model.preparation
    if prepared is None:
        raise SimForcingError(f"{where} does not say how its inputs are prepared; it cannot be trained further here")
    ours, theirs = prepared.to_dict()[0], header
    pairs = {
        "codec": (ours["codec_identity"], theirs["codec"]),
        "rule": (ours["rule"], theirs["rule"]),
        "action": (ours["action"], theirs["action"]),
    }
    for name, (a, b) in pairs.items():
        if a != b:
            raise SimForcingError(f"{where} was trained with {name} {a}, the data have {b}")


def adapted(start: WorldModel, preparation: Preparation) -> WorldModel:
    """A teacher for other data: the weights of `start`, the statistics, words and conventions of the new data.

    Raises:
        SimForcingError: latents, clips or widths are of another kind, so the weights would mean nothing.
    """
    if start.preparation is None or start.preparation.codec_identity != preparation.codec_identity:
        raise SimForcingError("the model to start from was trained on latents of another codec")
    if start.preparation.rule != preparation.rule:
        raise SimForcingError(
            f"the model to start from takes clips of {start.preparation.rule}, not {preparation.rule}"
        )
    widths = {
        "actions": (start.config.action_dim, len(preparation.action_stats.min)),
        "states": (start.config.proprio_dim, len(preparation.state_stats.min)),
    }
    for name, (ours, theirs) in widths.items():
        if ours != theirs:
            raise SimForcingError(f"the model to start from takes {name} of {ours} numbers, the data have {theirs}")
    model = WorldModel(start.config, preparation)
    load_strictly(model, {k: v.clone() for k, v in start.state_dict().items()}, "the model to start from")
    return model


def student_of(teacher: WorldModel) -> WorldModel:
    """The student starts as its teacher, with a simulation condition that starts at zero."""
    return teacher.with_sim_condition() if teacher.sim is None else teacher


def single_loss(model: WorldModel, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
    """Teacher and baselines."""
    return single_domain_loss(model, batch, draw(model, batch.latents, ObjectiveConfig(), generator))


def distilled_loss(teacher: WorldModel, config: ObjectiveConfig) -> Loss:
    """The student's loss under a frozen teacher."""
    teacher = teacher.eval().requires_grad_(False)

    def loss(model: WorldModel, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        return student_loss(model, teacher, batch, draw(model, batch.latents, config, generator), config)

    return loss
