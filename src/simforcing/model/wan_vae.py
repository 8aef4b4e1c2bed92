"""The causal VAE of Wan2.2-TI2V-5B from either layout, strictly, as diffusers' `AutoencoderKLWan`.

diffusers' own loader of single files knows the names of Wan2.1's VAE only; here are those of Wan2.2.
"""

import inspect
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.model.wan import STEM
from simforcing.model.weights import Weights, is_torch_file, read_json, read_shards, read_state, shapes

# Mean and standard deviation of each latent channel, as published with Wan2.2-TI2V-5B; a .pth file does not hold them.
LATENTS_MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
LATENTS_STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip

_FIXED = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    "conv_in": "conv1",
    "norm_out": "head.0",
    "conv_out": "head.2",
    "mid_block.resnets.0": "middle.0",
    "mid_block.attentions.0": "middle.1",
    "mid_block.resnets.1": "middle.2",
}
_RESNET = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
_RESNET |= {"conv_shortcut": "shortcut"}
_STAGE = re.compile(r"(encoder\.down|decoder\.up)_blocks\.(\d+)\.(?:resnets\.(\d+)|(?:down|up)sampler)\.(.+)")


def original_name(ours: str, resnets: int) -> str:
    """The original name of a parameter that diffusers names `ours`; `resnets` a stage of the encoder (2 in Wan2.2).

    The resampler of a stage follows its residual blocks, of which a decoder's stage has one more.
    """
    if found := _STAGE.fullmatch(ours):
        side, stage, resnet, rest = found.groups()
        half, way = side.split(".")
        last = resnets if way == "down" else resnets + 1
        return f"{half}.{way}samples.{stage}.{way}samples.{resnet or last}.{_resnet(rest) if resnet else rest}"
    half, _, rest = ours.partition(".")
    if half not in ("encoder", "decoder"):
        return f"{_FIXED[half]}.{rest}" if half in _FIXED else ours
    for name, theirs in _FIXED.items():
        if rest.startswith(name + "."):
            tail = rest.removeprefix(name + ".")
            return f"{half}.{theirs}.{_resnet(tail) if '.resnets.' in ours else tail}"
    return ours


def _resnet(tail: str) -> str:
    layer, _, rest = tail.partition(".")
    return f"{_RESNET.get(layer, layer)}.{rest}"


def read_vae(path: Path) -> Any:
    """An `AutoencoderKLWan` in the file's dtype: a directory of diffusers, or an original `.pth`.

    Raises:
        SimForcingError: there is none, or tensors are missing, unexpected or wrongly shaped (listed).
    """
    if path.is_dir():
        return _from_diffusers(path)
    if path.is_file() and is_torch_file(path):
        return _from_original(path)
    raise SimForcingError(f"{path} holds no AutoencoderKLWan: give a directory of diffusers, or Wan2.2_VAE.pth")


def is_vae(directory: Path) -> bool:
    """Whether a directory is one of diffusers' `AutoencoderKLWan`, by its `config.json`."""
    config = directory / "config.json"
    return config.is_file() and read_json(config).get("_class_name") == "AutoencoderKLWan"


def is_original_vae(keys: set[str]) -> bool:
    """Whether the names of tensors are those of Wan2.2's VAE (Wan2.1's has no stages inside stages)."""
    return any(re.match(r"encoder\.downsamples\.0\.downsamples\.0\.", key) for key in keys)


def _from_diffusers(directory: Path) -> Any:
    if not is_vae(directory):
        raise SimForcingError(f"{directory} holds no AutoencoderKLWan: config.json does not name one")
    vae = _empty(read_json(directory / "config.json"), str(directory))
    weights = Weights(read_shards(directory, STEM), lambda ours: ours, str(directory))
    return _filled(vae, weights)


def _from_original(path: Path) -> Any:
    state = read_state(path)
    if not is_original_vae(set(state)):
        raise SimForcingError(f"{path} is not the VAE of Wan2.2 (no encoder.downsamples.0.downsamples.0)")
    config = _config(Weights(state, lambda theirs: theirs, str(path)))
    resnets = config["num_res_blocks"]
    weights = Weights(state, lambda ours: original_name(ours, resnets), str(path))
    return _filled(_empty(config, str(path)), weights)


def _config(weights: Weights) -> dict[str, Any]:
    """Sizes of an original VAE, from shapes; `weights` under its own names."""
    base, inputs, *_ = weights.shape("encoder.conv1.weight", 5)
    channels = weights.shape("conv2.weight", 5)[0]
    if channels != len(LATENTS_MEAN):
        raise SimForcingError(
            f"{weights.where} has {channels} latent channels; the published mean and deviation are of "
            f"{len(LATENTS_MEAN)}, so convert it to diffusers' layout, whose config.json holds them"
        )
    stages = weights.count("encoder.downsamples.")
    inside = [weights.count(f"encoder.downsamples.{i}.downsamples.") for i in range(stages)]
    resnets = inside[-1]  # the last stage has no resampler
    widths = [
        weights.shape(f"encoder.downsamples.{i}.downsamples.0.residual.6.weight", 5)[0] / base for i in range(stages)
    ]
    return {
        "base_dim": base,
        "decoder_base_dim": weights.shape("decoder.head.0.gamma", 4)[0],
        "z_dim": channels,
        "dim_mult": [int(width) if width == int(width) else width for width in widths],
        "num_res_blocks": resnets,
        "temperal_downsample": [
            f"encoder.downsamples.{i}.downsamples.{resnets}.time_conv.weight" in weights.tensors
            for i in range(stages - 1)
        ],
        "is_residual": True,
        "in_channels": inputs,
        "out_channels": inputs,
        "patch_size": math.isqrt(inputs // 3),
        "latents_mean": list(LATENTS_MEAN),
        "latents_std": list(LATENTS_STD),
        "scale_factor_temporal": 4,
        "scale_factor_spatial": 8 * math.isqrt(inputs // 3),
    }


def _empty(config: dict[str, Any], where: str) -> Any:
    """An `AutoencoderKLWan` of these sizes without weights."""
    from diffusers import AutoencoderKLWan

    known = inspect.signature(AutoencoderKLWan.__init__).parameters
    try:
        with torch.device("meta"):
            return AutoencoderKLWan(**{key: value for key, value in config.items() if key in known})
    except (TypeError, ValueError, IndexError, AssertionError, RuntimeError, ZeroDivisionError) as error:
        raise SimForcingError(f"{where}: no AutoencoderKLWan has these sizes: {error}") from error


def _filled(vae: Any, weights: Weights) -> Any:
    state: dict[str, Tensor] = weights.fitted(shapes(vae))
    vae.load_state_dict(state, assign=True)
    return vae.eval().requires_grad_(False)
