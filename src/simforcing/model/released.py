"""The authors' checkpoints, read and written.

A file is `{"mot": state, "proprio_encoder": state, "step": int, "torch_dtype": str}`, perhaps with `optimizer`; its
states are named here as if flattened, `mot.<key>` and `proprio_encoder.<key>`. A teacher is a file without
`sim_cond_conv`, a student has one in every video block.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.files import partial_path
from simforcing.model import wan
from simforcing.model.text import PROMPTS
from simforcing.model.weights import Weights, describe, is_state, read_json, read_safetensors, shapes
from simforcing.model.world_model import WorldModel, WorldModelConfig

PARTS = ("mot", "proprio_encoder")
RECORD = "released.json"
"""Beside an imported model: what its file said beyond weights, for writing it back."""

_SIM = re.compile(r"video\.blocks\.(\d+)\.sim_cond_conv\.(.+)")
_OUR_SIM = re.compile(r"sim\.blocks\.(\d+)\.(.+)")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def our_name(key: str) -> str:
    """Our parameter name for a key `mot.<...>` or `proprio_encoder.<...>` of the authors."""
    if key.startswith("proprio_encoder."):
        return "proprio." + key.removeprefix("proprio_encoder.")
    name = key.removeprefix("mot.").removeprefix("mixtures.")
    if found := _SIM.fullmatch(name):
        return f"sim.blocks.{found[1]}.{found[2]}"
    expert, _, rest = name.partition(".")
    return f"{expert}.{wan.our_name(rest)}"


def released_name(ours: str) -> str:
    """Inverse of `our_name`: the authors' key for a parameter of `WorldModel`."""
    if ours.startswith("proprio."):
        return "proprio_encoder." + ours.removeprefix("proprio.")
    if found := _OUR_SIM.fullmatch(ours):
        return f"mot.mixtures.video.blocks.{found[1]}.sim_cond_conv.{found[2]}"
    expert, _, rest = ours.partition(".")
    return f"mot.mixtures.{expert}.{wan.original_name(rest)}"


def our_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The authors' flattened state dict under our names."""
    return {our_name(k): v for k, v in state.items()}


def released_prompts(role: Literal["teacher", "student"]) -> dict[str, str]:
    """The prompt templates that a released model was trained with: a student's are the default one for both domains."""
    return dict(PROMPTS) if role == "teacher" else dict.fromkeys(PROMPTS, PROMPTS["default"])


@dataclass(frozen=True)
class Released:
    """A checkpoint of the authors under our names; `left_out` names what a model directory does not keep."""

    config: WorldModelConfig
    state: dict[str, Tensor]
    step: int
    torch_dtype: str
    left_out: tuple[str, ...]

    @property
    def role(self) -> Literal["teacher", "student"]:
        """A student can be conditioned on simulation."""
        return "student" if self.config.sim_condition else "teacher"

    def record(self) -> dict[str, Any]:
        """For the file `RECORD`."""
        return {"step": self.step, "torch_dtype": self.torch_dtype}


def is_released(content: Any) -> bool:
    """Whether a file's content is a checkpoint of the authors."""
    return isinstance(content, Mapping) and isinstance(content.get("mot"), Mapping)


def read_released(content: Mapping[str, Any], where: str, heads: int | None = None, eps: float = 1e-6) -> Released:
    """Sizes come from shapes; `heads` and `eps` are what shapes do not tell (None: 24 heads of 128, as in the paper).

    Raises:
        SimForcingError: lists missing, unexpected and wrongly shaped tensors; or sizes that contradict each other.
    """
    flat: dict[str, Tensor] = {}
    for part in PARTS:
        if not is_state(content.get(part)):
            raise SimForcingError(f"{where}: '{part}' should hold named tensors, but is {describe(content.get(part))}")
        flat |= {f"{part}.{key}": value for key, value in content[part].items()}
    others = {key: value for key, value in content.items() if key not in (*PARTS, "step", "torch_dtype")}
    if unexpected := sorted(str(k) for k, v in others.items() if k != "optimizer" and _holds_tensors(v)):
        raise SimForcingError(f"{where} does not fit; unexpected: tensors under {', '.join(unexpected)}")
    weights = Weights(flat, released_name, where)
    config = _config(weights, heads, eps)
    with torch.device("meta"):
        wanted = shapes(WorldModel(config))
    state = weights.fitted(wanted)
    step, dtype = content.get("step", 0), content.get("torch_dtype", str(state["video.patch_embedding.weight"].dtype))
    if not isinstance(step, int) or not isinstance(dtype, str):
        raise SimForcingError(
            f"{where}: step is {step!r} and torch_dtype {dtype!r}; a whole number and a word are needed"
        )
    return Released(config, state, step, dtype, tuple(sorted(map(str, others))))


def _config(weights: Weights, heads: int | None, eps: float) -> WorldModelConfig:
    _, channels, *kernel = weights.shape("video.patch_embedding.weight", 5)
    return WorldModelConfig(
        video=wan.expert_config(weights, "video", "mot.mixtures.video.blocks.", heads, eps),
        action=wan.expert_config(weights, "action", "mot.mixtures.action.blocks.", heads, eps),
        channels=channels,
        patch=(kernel[0], kernel[1], kernel[2]),
        action_dim=weights.shape("action.action_encoder.weight", 2)[1],
        proprio_dim=weights.shape("proprio.weight", 2)[1],
        action_positions="index",
        sim_condition=any(".sim_cond_conv." in key for key in weights.tensors),
    )


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return any(map(_holds_tensors, value)) if isinstance(value, list | tuple) else isinstance(value, Tensor)


def export_released(
    directory: Path, out: Path, dtype: str | None = None, step: int | None = None
) -> tuple[int, torch.dtype]:
    """Writes a model directory as a file of the authors: the stored tensors bit by bit, unless `dtype` is given.

    step, torch_dtype: as given, else as the imported file had them, else 0 and the weights' own. Returns the number of
    tensors and their dtype.

    Raises:
        SimForcingError: there is no model, `out` exists, or the model is one that the layout cannot hold.
    """
    if out.exists():
        raise SimForcingError(f"{out} exists; choose another name")
    if dtype is not None and dtype not in DTYPES:
        raise SimForcingError(f"dtype {dtype!r}: there are {', '.join(DTYPES)}")
    description = read_json(directory / "config.json")
    if not isinstance(description.get("model"), dict):
        raise SimForcingError(f"{directory / 'config.json'} does not describe a world model")
    config = WorldModelConfig.from_dict(description["model"])
    check_exportable(config, description.get("preparation"), str(directory))
    with torch.device("meta"):
        wanted = shapes(WorldModel(config))
    found = read_safetensors(directory / "model.safetensors")
    state = Weights(found, lambda ours: ours, str(directory)).fitted(wanted)
    record = read_json(directory / RECORD) if (directory / RECORD).is_file() else {}
    weights = {released_name(key): _owned(value, dtype) for key, value in state.items()}
    own = weights["mot.mixtures.video.patch_embedding.weight"].dtype
    content: dict[str, Any] = {
        part: {k.removeprefix(f"{part}."): v for k, v in weights.items() if k.startswith(f"{part}.")} for part in PARTS
    }
    content["step"] = int(record.get("step", 0)) if step is None else step
    content["torch_dtype"] = str(own) if dtype is not None else record.get("torch_dtype", str(own))
    partial = partial_path(out)
    try:
        torch.save(content, partial)
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return len(weights), own


def check_exportable(config: WorldModelConfig, preparation: Mapping[str, Any] | None, where: str) -> None:
    """Refuses what the authors' layout cannot say, so that their code would run the model as another one.

    Raises:
        SimForcingError: lists every such choice.
    """
    default = WorldModelConfig.__dataclass_fields__
    problems = []
    if config.action_positions != "index":
        problems.append(f"action_positions is {config.action_positions!r}, the layout's is 'index'")
    for name in ("patch", "flow", "attention"):
        if getattr(config, name) != default[name].default:
            problems.append(f"{name} is {getattr(config, name)}, the layout's is {default[name].default}")
    if config.video.eps != config.action.eps or config.video.eps != 1e-6:
        problems.append(f"eps is {config.video.eps} and {config.action.eps}, the layout's is 1e-06")
    if (config.video.head_dim // 3) % 2:
        problems.append(f"heads are {config.video.head_dim} wide, whose third must be even")
    for name, released in (("text_pooling", "tokens"), ("text_padding", "zeros")):
        chosen = released if preparation is None else preparation.get(name, "masked")
        if chosen != released:
            problems.append(f"{name} is {chosen!r}, the layout's is {released!r}")
    if problems:
        raise SimForcingError(f"{where} cannot be written in the authors' layout: {'; '.join(problems)}")


def _owned(value: Tensor, dtype: str | None) -> Tensor:
    """A tensor that fills its storage, since `torch.save` writes whole storages and this may be a view of a file."""
    value = value if dtype is None else value.to(DTYPES[dtype])
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def write_record(directory: Path, record: Mapping[str, Any]) -> None:
    """Puts `RECORD` into a directory that is being written."""
    (directory / RECORD).write_text(json.dumps(dict(record), indent=2) + "\n")
