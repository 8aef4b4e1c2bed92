"""Teacher, student and baselines: what each starts from and what it minimises."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from simforcing.data.cache import Cache, open_cache
from simforcing.data.episode import ActionConvention
from simforcing.data.stats import Normalizer
from simforcing.data.windows import ClipRule, load_split
from simforcing.errors import SimForcingError
from simforcing.model.codec import load_codec
from simforcing.model.preparation import Preparation
from simforcing.model.world_model import WorldModel, WorldModelConfig, load_strictly
from simforcing.train.batches import LatentClips, from_cache
from simforcing.train.objective import Batch, Draws, ObjectiveConfig, draw, single_domain_loss, student_loss
from simforcing.train.recipe import Recipe, Role

IN_MEMORY = 2 << 30  # bytes
DOMAINS: dict[Role, tuple[Literal["real", "sim"], ...]] = {
    "teacher": ("sim",),
    "student": ("real", "sim"),
    "baseline": ("real",),
}


def new_preparation(found: Recipe, header: dict[str, Any], action: np.ndarray, state: np.ndarray) -> Preparation:
    """What a model trained from scratch on these rows is prepared with."""
    return Preparation(
        action_stats=Normalizer.fit(action.reshape(-1, action.shape[-1])),
        state_stats=Normalizer.fit(state.reshape(-1, state.shape[-1])),
        rule=ClipRule(**header["rule"]),
        action=ActionConvention.from_dict(header["action"]),
        codec=found.codec,
        codec_identity=header["codec"],
        text=found.text,
        text_length=found.text_length,
        text_pooling=found.text_pooling,
        text_padding=found.text_padding,
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
    """An encoded dataset with its split; up to `IN_MEMORY` it is read at once, else latents stay on disk."""

    def __init__(self, cache: Path, split: Path, found: Recipe) -> None:
        stored = open_cache(cache, {"rule": asdict(found.rule), "codec": load_codec(found.codec).identity})
        self.header, self.arrays = stored.header, held(stored)
        self.split = load_split(split)
        self.channels = int(self.header["codec"]["channels"])
        for part in ("train", "val"):
            if not self.split.get(part):
                raise SimForcingError(f"{split} has no episodes in part '{part}'; train and val are needed")

    def preparation(self, found: Recipe) -> Preparation:
        """Statistics of the training episodes: of all their rows, or of the encoded windows in a cache without them."""
        return new_preparation(found, self.header, *ranges(self.arrays, self.split["train"]))

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


def held(stored: Cache) -> Mapping[str, np.ndarray]:
    """The arrays of a cache: in memory if they are not large, else read when asked for."""
    size = sum(math.prod(rows.shape) * rows.dtype.itemsize for rows in map(stored.rows, stored))
    return dict(stored) if size <= IN_MEMORY else stored


def ranges(arrays: Mapping[str, np.ndarray], episodes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Actions and states whose least and greatest values are those of these episodes."""
    chosen = np.isin(arrays["episode"], episodes)

    def rows(name: str, windows: str) -> np.ndarray:
        names = [f"{name}_min", f"{name}_max"]
        whole = all(n in arrays for n in names)
        return np.concatenate([arrays[n][chosen] for n in (names if whole else [windows])])

    return rows("action", "action"), rows("state", "proprio")


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
        "action": (prepared.action.to_dict(), ActionConvention.from_dict(theirs["action"]).to_dict()),
    }
    for name, (a, b) in pairs.items():
        if a != b:
            raise SimForcingError(f"{where} was trained with {name} {a}, the data have {b}")


def adapted(start: WorldModel, preparation: Preparation) -> WorldModel:
    """A teacher for other data: the weights of `start`, the statistics, words and conventions of the new data.

    A start that says nothing about its inputs is an imported video model, whose latents, clips and words are free as
    far as its widths allow. Projections of simulation that are still zero are left out: a teacher sees none.

    Raises:
        SimForcingError: latents, clips or widths are of another kind, so the weights would mean nothing.
    """
    known = start.preparation
    if known is not None and known.codec_identity != preparation.codec_identity:
        raise SimForcingError("the model to start from was trained on latents of another codec")
    if known is not None and known.rule != preparation.rule:
        raise SimForcingError(f"the model to start from takes clips of {known.rule}, not {preparation.rule}")
    widths = {
        "latents": (start.config.channels, preparation.codec_identity.get("channels", start.config.channels)),
        "actions": (start.config.action_dim, len(preparation.action_stats.min)),
        "states": (start.config.proprio_dim, len(preparation.state_stats.min)),
    }
    for name, (ours, theirs) in widths.items():
        if ours != theirs:
            raise SimForcingError(f"the model to start from takes {name} of {ours} numbers, the data have {theirs}")
    state = {k: v.clone() for k, v in start.state_dict().items()}
    config = start.config
    if known is None and not any(bool(v.any()) for k, v in state.items() if k.startswith("sim.")):
        config = replace(config, sim_condition=False)
        state = {k: v for k, v in state.items() if not k.startswith("sim.")}
    model = WorldModel(config, preparation)
    load_strictly(model, state, "the model to start from")
    return model


def student_of(teacher: WorldModel) -> WorldModel:
    """The student starts as its teacher, with a simulation condition that starts at zero."""
    return teacher.with_sim_condition() if teacher.sim is None else teacher


@dataclass(frozen=True)
class Objective:
    """What teacher and baselines (no `teacher`) or the student minimise; a `Loss` of the loop."""

    config: ObjectiveConfig = ObjectiveConfig()
    teacher: WorldModel | None = None

    def draw(self, model: WorldModel, batch: Batch, generators: Sequence[torch.Generator]) -> Draws:
        """All randomness, drawn clip by clip, so that it does not depend on which clips share a batch."""
        rows = batch.latents.split(1)
        clips = [draw(model, row, self.config, g) for row, g in zip(rows, generators, strict=True)]
        parts = {name: [getattr(one, name) for one in clips] for name in Draws._fields}
        return Draws(**{name: torch.cat(found) for name, found in parts.items() if found[0] is not None})

    def __call__(self, model: WorldModel, batch: Batch, draws: Draws) -> dict[str, Tensor]:
        """The named terms; `total` is minimised."""
        if self.teacher is None:
            return single_domain_loss(model, batch, draws, self.config)
        return student_loss(model, self.teacher, batch, draws, self.config)


def flow_loss(config: ObjectiveConfig = ObjectiveConfig()) -> Objective:
    """The loss of teacher and baselines."""
    return Objective(config)


def distilled_loss(teacher: WorldModel, config: ObjectiveConfig) -> Objective:
    """The student's loss under a frozen teacher."""
    return Objective(config, teacher.eval().requires_grad_(False))
