"""The action expert's first weights: the video expert's, resized.

Legend: S source sizes, T target sizes.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from jaxtyping import Float, Float32
from torch import Tensor, nn

from simforcing.errors import SimForcingError
from simforcing.model import wan
from simforcing.model.experts import ActionExpert, ExpertConfig
from simforcing.model.weights import Weights, number, shapes

NEW = ("action_encoder.", "head.")
"""What the video expert has nothing for, in an action expert."""


def resize(source: Float[Tensor, "*S"], size: Sequence[int]) -> Float32[Tensor, "*T"]:
    """A tensor at another size: linear interpolation along one dimension after another, end points kept.

    Where the last of several dimensions (the inputs of a linear map) changes, values are scaled by sqrt(old / new), so
    that outputs keep their size. Vectors are not scaled. (The released initialisation of the action transformer.)
    """
    if source.ndim != len(size):
        raise ValueError(f"resize: source has {source.ndim} dimensions, size {tuple(size)} has {len(size)}")
    result = source.float()
    for dim, new in enumerate(size):
        if result.shape[dim] == new:
            continue
        lines = result.movedim(dim, -1)
        flat = lines.reshape(-1, 1, lines.shape[-1])
        longer = functional.interpolate(flat, size=new, mode="linear", align_corners=True)
        result = longer.reshape(*lines.shape[:-1], new).movedim(-1, dim)
    if source.ndim >= 2 and source.shape[-1] != size[-1]:
        result = result * math.sqrt(source.shape[-1] / size[-1])
    return result.contiguous()


def action_shapes(config: ExpertConfig, action_dim: int) -> dict[str, torch.Size]:
    """Names and shapes of an action expert's parameters, without those in `NEW`."""
    with torch.device("meta"):
        wanted = shapes(ActionExpert(config, action_dim))
    return {key: shape for key, shape in wanted.items() if not key.startswith(NEW)}


def from_video(video: Mapping[str, Tensor], config: ExpertConfig, action_dim: int) -> dict[str, Tensor]:
    """An action expert's parameters (without those in `NEW`) from a video expert's, dtypes kept.

    Raises:
        SimForcingError: the experts differ in what must be equal for it: number of blocks, attention width.
    """
    result: dict[str, Tensor] = {}
    for key, shape in action_shapes(config, action_dim).items():
        if key not in video:
            raise SimForcingError(f"the action expert's {key} has no counterpart in the video expert")
        source = video[key]
        result[key] = source.clone() if source.shape == shape else resize(source, shape).to(source.dtype)
    return result


def is_backbone(content: Any) -> bool:
    """Whether a file's content is the authors' action backbone."""
    return isinstance(content, Mapping) and "backbone_state_dict" in content


def read_backbone(content: Mapping[str, Any], where: str, action_dim: int) -> tuple[ExpertConfig, dict[str, Tensor]]:
    """Sizes and parameters (without those in `NEW`) of the authors' file {policy, backbone_state_dict, meta}.

    Raises:
        SimForcingError: a size is missing, or tensors are missing, unexpected or wrongly shaped (listed).
    """
    meta, state = content.get("meta"), content["backbone_state_dict"]
    if not isinstance(meta, Mapping) or not isinstance(state, Mapping):
        raise SimForcingError(f"{where}: an action backbone has 'meta' (sizes) and 'backbone_state_dict' (tensors)")
    names = {"dim": "hidden_dim", "ffn_dim": "ffn_dim", "num_layers": "num_layers", "num_heads": "num_heads"}
    names |= {"head_dim": "attn_head_dim", "text_dim": "text_dim", "freq_dim": "freq_dim"}
    sizes = {ours: number(meta, theirs, f"{where}, meta") for ours, theirs in names.items()}
    config = ExpertConfig(**sizes, eps=float(meta.get("eps", 1e-6)))
    weights = Weights(state, wan.original_name, where)
    return config, weights.fitted(action_shapes(config, action_dim))


def default_linear(inputs: int, outputs: int, prefix: str, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """A new linear map as torch initialises it, from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = nn.Linear(inputs, outputs)
    return {prefix + key: value.to(dtype) for key, value in layer.state_dict().items()}


def check_joint(video: ExpertConfig, action: ExpertConfig, where: Path | str) -> None:
    """Refuses an action expert that cannot attend jointly with the video expert, and names what differs."""
    fields = ("num_layers", "num_heads", "head_dim", "text_dim", "freq_dim", "eps")
    differs = [
        f"{name} is {getattr(action, name)}, not {getattr(video, name)}"
        for name in fields
        if getattr(action, name) != getattr(video, name)
    ]
    if differs:
        raise SimForcingError(f"{where} does not fit the video transformer: {'; '.join(differs)}")
