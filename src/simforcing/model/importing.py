"""Checkpoints of others into our model directories, told apart by what they hold.

A directory that is written here has `config.json` and `model.safetensors` with every tensor in the dtype that it had;
of a released checkpoint also `released.json` (step, dtype) and, where the preparation is known, `stats.json`; of a Wan
release also `codec/` (the VAE, diffusers' layout) and `text/` (UMT5 and its tokeniser, Hugging Face's layout).
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from simforcing.data.episode import ActionConvention
from simforcing.data.stats import Normalizer
from simforcing.data.windows import ClipRule
from simforcing.errors import SimForcingError
from simforcing.files import partial_path
from simforcing.model import backbone, released, umt5, wan_vae
from simforcing.model.codec import load_codec
from simforcing.model.experts import ExpertConfig
from simforcing.model.preparation import Preparation
from simforcing.model.released import Released
from simforcing.model.text import TextEncoder
from simforcing.model.wan import WanTransformer, find_transformer
from simforcing.model.weights import (
    check_archive,
    check_finite,
    describe,
    is_state,
    is_torch_file,
    read_json,
    read_pickle,
    shapes,
    torch_file,
)
from simforcing.model.world_model import WorldModel, WorldModelConfig, load_strictly

BRIDGE_RULE = ClipRule(frames=21, stride=1, height=224, width=320)
BRIDGE_ACTION = ActionConvention("delta", "state", "base", "rotvec", "open_positive", (-1.0, 1.0), 5.0)
"""Clips and actions of the released Bridge models."""

Step = Callable[[str], None]
"""Told what is being done next."""

Part = Callable[[Path], None]
"""Writes something into the directory that it is given."""


@dataclass(frozen=True)
class PreparationSource:
    """What a released file does not hold: statistics, codec, text encoder, clips and the meaning of actions.

    stats: the authors' `dataset_stats.json`. codec, text: as `load_codec` and `TextEncoder.load` take them; paths are
    written as absolute ones. convention: JSON of an action convention, or a dataset's `meta/simforcing.json`.
    """

    stats: Path
    codec: str
    text: str
    text_length: int = 128
    rule: ClipRule = BRIDGE_RULE
    convention: Path | None = None


@dataclass(frozen=True)
class ActionSizes:
    """Sizes of what a Wan release has no weights for, and the seed of those that start at random."""

    width: int = 1024
    ffn: int = 4096
    action_dim: int = 7
    proprio_dim: int = 7
    seed: int = 0


def recognise(path: Path) -> WanTransformer | Any:
    """What is at `path`: a Wan transformer, or the content of a released file.

    Raises:
        SimForcingError: it is neither; says what it is instead, as far as that can be told.
    """
    if not path.exists():
        raise SimForcingError(f"{path}: no such file or directory")
    if path.is_dir():
        if (found := find_transformer(path)) is not None:
            return found
        if (path / "model.safetensors").is_file() and "model" in read_json(path / "config.json"):
            raise SimForcingError(f"{path} is a model directory of this package already; there is nothing to import")
        raise SimForcingError(
            f"{path} is no Wan2.2 release: neither it nor its transformer/ has config.json and "
            "diffusion_pytorch_model*.safetensors; of the authors' checkpoints, give the .pt file itself"
        )
    if not is_torch_file(path):
        raise SimForcingError(f"{path} is not a file of torch.save; give the authors' .pt or a directory of Wan2.2")
    check_archive(path)
    content = read_pickle(path)
    if released.is_released(content):
        return content
    if backbone.is_backbone(content):
        advice = "the initial weights of an action expert: import a Wan2.2 directory with --action-backbone"
    elif is_state(content) and wan_vae.is_original_vae(set(content)):
        advice = "the VAE of Wan2.2: import its directory, or give it as --codec"
    elif is_state(content) and umt5.is_original(set(content)):
        advice = "a text encoder: import its directory, or give that as --text umt5:DIR"
    else:
        advice = f"{describe(content)}, no 'mot' and 'proprio_encoder'"
    raise SimForcingError(f"{path} is not a checkpoint of the authors: it holds {advice}")


def import_released(
    content: Any,
    path: Path,
    out: Path,
    source: PreparationSource | None = None,
    heads: int | None = None,
    eps: float = 1e-6,
    step: Step = lambda words: None,
) -> Released:
    """Writes the model of a released file; without `source` it has no preparation, and takes latents only.

    Raises:
        SimForcingError: tensors do not fit (listed), or the preparation does not fit the model.
    """
    found = released.read_released(content, str(path), heads, eps)
    check_finite(found.state, str(path))
    if source is None:
        preparation = None
    else:
        step("reading codec, text encoder and statistics")
        preparation = released_preparation(source, found)
    record: dict[str, Part] = {"the record": lambda to: released.write_record(to, found.record())}
    write_directory(out, found.config, preparation, found.state, record, step)
    return found


def released_preparation(source: PreparationSource, found: Released) -> Preparation:
    """How a released model's inputs are made: padded text is attended to as zeros, prompts as the model was trained.

    Raises:
        SimForcingError: a part cannot be read, or has another width than the model.
    """
    codec_source, text_source = (_absolute(name) for name in (source.codec, source.text))
    codec, text = load_codec(codec_source), TextEncoder.load(text_source, source.text_length)
    codec.latent_shape(source.rule.frames, source.rule.height, source.rule.width)
    action, state = read_stats(source.stats)
    config = found.config
    widths = {
        f"codec {source.codec}: channels": (codec.channels, config.channels),
        f"text encoder {source.text}: width": (text.width, config.video.text_dim),
        f"{source.stats}: numbers of an action": (len(action.min), config.action_dim),
        f"{source.stats}: numbers of a state": (len(state.min), config.proprio_dim),
    }
    if bad := [f"{what} {got}, the model's {want}" for what, (got, want) in widths.items() if got != want]:
        raise SimForcingError("; ".join(bad))
    return Preparation(
        action_stats=action,
        state_stats=state,
        rule=source.rule,
        action=BRIDGE_ACTION if source.convention is None else read_convention(source.convention),
        codec=codec_source,
        codec_identity=codec.identity,
        text=text_source,
        text_length=source.text_length,
        text_pooling="tokens",
        text_padding="zeros",
        prompts=released.released_prompts(found.role),
    )


def read_stats(path: Path) -> tuple[Normalizer, Normalizer]:
    """Action and state statistics of the authors' `dataset_stats.json`."""
    stored = read_json(path)
    try:
        return Normalizer.from_dict(stored["action"]["default"]), Normalizer.from_dict(stored["state"]["default"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SimForcingError(
            f"{path} has no statistics of the released form (action and state, 'default', min and max): {error!r}"
        ) from error


def read_convention(path: Path) -> ActionConvention:
    """An action convention from its JSON, or from a dataset's `meta/simforcing.json`."""
    stored = read_json(path)
    inner = stored.get("action", stored)
    if not isinstance(inner, dict):
        raise SimForcingError(f"{path}: 'action' is not an object that describes a convention")
    return ActionConvention.from_dict(inner)


def _absolute(source: str) -> str:
    """A path in `source` as an absolute one, so that the model can be used from any directory; a name as it is."""
    prefix = umt5.PREFIX if source.startswith(umt5.PREFIX) else ""
    path = Path(source.removeprefix(prefix))
    return prefix + str(path.resolve()) if path.exists() else source


def import_wan(
    found: WanTransformer,
    out: Path,
    sizes: ActionSizes = ActionSizes(),
    action_backbone: Path | None = None,
    transformer_only: bool = False,
    step: Step = lambda words: None,
) -> tuple[WorldModelConfig, list[str]]:
    """Writes a world model that starts from a Wan transformer, and the release's VAE and text encoder beside it.

    The action expert is the video expert resized, or read from the authors' `action_backbone` file; what has no
    counterpart (action encoder and head, proprioception) starts as torch does it, simulation projections start at zero.

    Returns the configuration and the names of parts that the release does not have.

    Raises:
        SimForcingError: tensors do not fit (listed), or a part is damaged.
    """
    config, state = wan_state(found, sizes, action_backbone)
    check_finite(state, str(found.directory))
    root = found.directory.parent if found.directory.name == "transformer" else found.directory
    parts: dict[str, Part] = {}
    absent: list[str] = []
    if not transformer_only:
        vae, text = find_vae(root), find_text(root)
        if vae is not None:
            parts["the codec"] = lambda to: write_codec(vae, to / "codec")
        if text is not None:
            parts["the text encoder"] = lambda to: write_text(text, to / "text")
        absent = [name for name, part in (("VAE", vae), ("text encoder", text)) if part is None]
    write_directory(out, config, None, state, parts, step)
    return config, absent


def wan_state(
    found: WanTransformer, sizes: ActionSizes = ActionSizes(), action_backbone: Path | None = None
) -> tuple[WorldModelConfig, dict[str, Tensor]]:
    """Configuration and all parameters of the world model that a Wan transformer starts; see `import_wan`."""
    video, channels, patch, weights = found.read()
    action, resized = replace(video, dim=sizes.width, ffn_dim=sizes.ffn), None
    if action_backbone is not None:
        check_archive(action_backbone)
        content = read_pickle(action_backbone)
        if not backbone.is_backbone(content):
            raise SimForcingError(f"{action_backbone} is no action backbone: it holds {describe(content)}")
        action, resized = backbone.read_backbone(content, str(action_backbone), sizes.action_dim)
        backbone.check_joint(video, action, action_backbone)
    config = WorldModelConfig(
        video=video,
        action=action,
        channels=channels,
        patch=patch,
        action_dim=sizes.action_dim,
        proprio_dim=sizes.proprio_dim,
    )
    with torch.device("meta"):
        wanted = shapes(WorldModel(config))
    state = weights.fitted({key: shape for key, shape in wanted.items() if key.startswith("video.")})
    if resized is None:
        inner = {key.removeprefix("video."): value for key, value in state.items()}
        resized = backbone.from_video(inner, action, sizes.action_dim)
    dtype = state["video.patch_embedding.weight"].dtype
    state |= {f"action.{key}": value for key, value in resized.items()}
    state |= _new_parameters(video, action, sizes, dtype)
    return config, state | {
        key: torch.zeros(shape, dtype=dtype) for key, shape in wanted.items() if key.startswith("sim.")
    }


def _new_parameters(
    video: ExpertConfig, action: ExpertConfig, sizes: ActionSizes, dtype: torch.dtype
) -> dict[str, Tensor]:
    linear, seed = backbone.default_linear, sizes.seed
    return (
        linear(sizes.action_dim, action.dim, "action.action_encoder.", dtype, seed)
        | linear(action.dim, sizes.action_dim, "action.head.", dtype, seed + 1)
        | linear(sizes.proprio_dim, video.text_dim, "proprio.", dtype, seed + 2)
    )


def find_vae(root: Path) -> Path | None:
    """The VAE of a Wan release: `vae/`, or the original .pth; None if there is none."""
    return root / "vae" if wan_vae.is_vae(root / "vae") else torch_file(root, wan_vae.is_original_vae)


def find_text(root: Path) -> umt5.UMT5Files | None:
    """The text encoder of a Wan release; None if there is none, an error if only its tokeniser is missing."""
    return None if umt5.find_weights(root) is None else umt5.find_umt5(root)


def write_codec(source: Path, out: Path) -> None:
    """A VAE of either layout as a directory of diffusers, in its own dtype."""
    if source.is_file():
        check_archive(source)
    vae = wan_vae.read_vae(source)
    check_finite(vae.state_dict(), str(source))
    vae.save_pretrained(out)


def write_text(files: umt5.UMT5Files, out: Path) -> None:
    """A UMT5 encoder and its tokeniser as `umt5:<out>` reads them, in the weights' own dtypes."""
    if files.original:
        check_archive(files.weights)
    state = files.state()
    check_finite(state, str(files.weights))
    encoder, tokenizer = out / "text_encoder", out / "tokenizer"
    encoder.mkdir(parents=True)
    tokenizer.mkdir()
    (encoder / "config.json").write_text(json.dumps(files.config(), indent=2) + "\n")
    save_file({key: value.contiguous() for key, value in state.items()}, encoder / f"{umt5.STEM}.safetensors")
    for file in sorted(files.tokenizer.iterdir()):
        if file.is_file() and file.suffix in (".json", ".model", ".txt") and file.name != "config.json":
            shutil.copyfile(file, tokenizer / file.name)


def write_directory(
    out: Path,
    config: WorldModelConfig,
    preparation: Preparation | None,
    state: dict[str, Tensor],
    parts: Mapping[str, Part],
    step: Step,
) -> None:
    """A model directory and what the named `parts` put into it, under a temporary name until it is whole.

    Raises:
        SimForcingError: `out` exists.
    """
    if out.exists():
        raise SimForcingError(f"{out} exists; choose another directory, nothing was written")
    with torch.device("meta"):
        model = WorldModel(config, preparation)
    load_strictly(model, state, str(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(out)
    try:
        step("writing the weights")
        model.save_pretrained(partial)
        for name, write in parts.items():
            step(f"writing {name}")
            write(partial)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
