"""What a recipe needs in memory, computed from its configuration: nothing here is measured.

Parameters are counted on networks built on the meta device. Activations of the experts follow from their arithmetic
(`activations.py`), those of the codec from running it on the meta device and following every storage (`LiveBytes`).

Precision policy: weights that are trained, their gradients and both AdamW moments are float32; what is computed is in
`compute`, from copies of the weights in that type; the frozen teacher and inference hold weights in `compute` only.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simforcing.data.windows import ClipRule
from simforcing.errors import SimForcingError
from simforcing.model.codec import Codec, WanCodec, load_codec
from simforcing.model.text import MiniLM
from simforcing.model.umt5 import PREFIX, parameter_shapes
from simforcing.model.wan_vae import LATENTS_MEAN, LATENTS_STD
from simforcing.model.world_model import WorldModel, WorldModelConfig
from simforcing.train.activations import (
    FLOAT,
    Arithmetic,
    Shapes,
    activations,
    backward_work,
    forward_work,
    sim_residuals,
)
from simforcing.train.config import KEEP
from simforcing.train.encode import SHARD
from simforcing.train.lora import MARK, Adapted, add_adapters
from simforcing.train.recipe import WAN_CODEC, WAN_TEXT, Recipe

Compute = Literal["bfloat16", "float32"]
Sharding = Literal["none", "DDP", "FSDP2"]
Stage = Literal["teacher", "student", "baseline"]
STAGES: tuple[Stage, ...] = ("teacher", "student", "baseline")
BYTES: dict[Compute, int] = {"bfloat16": 2, "float32": 4}
COMPUTE_DTYPE: dict[Compute, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
GIB = 2**30
RESERVE_GIB, RESERVE_SHARE = 2.0, 0.05
"""Allowance for what is not in the table: CUDA context, NCCL, kernels' workspaces; and fragmentation, a share."""

WAN_VAE: dict[str, Any] = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 16,
    "latents_mean": LATENTS_MEAN,
    "latents_std": LATENTS_STD,
}
"""The VAE of Wan2.2-TI2V-5B in diffusers' words."""
UMT5_XXL = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "vocab_size": 256384,
    "relative_attention_num_buckets": 32,
}
"""The text encoder of Wan2.2-TI2V-5B in Hugging Face's words."""
MINILM = 22_713_216
"""Parameters of all-MiniLM-L6-v2, as its authors publish it."""


# -- networks on the meta device ------------------------------------------------------------------------------------


def count(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in module.parameters())


def wan_vae() -> Any:
    """Wan2.2-TI2V-5B's VAE without weights: 704,688,668 parameters on the meta device."""
    from diffusers import AutoencoderKLWan

    with torch.device("meta"):
        vae: Any = AutoencoderKLWan(**WAN_VAE)
    return vae.eval()


def meta_codec(source: str) -> Codec:
    """The codec of a recipe on the meta device.

    Raises:
        SimForcingError: there is no codec at `source`.
    """
    if source != WAN_CODEC:
        return load_codec(source).to("meta")
    return WanCodec(wan_vae()).to("meta")


def meta_model(recipe: Recipe, channels: int, sim_condition: bool) -> WorldModel:
    """The recipe's world model on the meta device, for 7 action numbers and 7 of proprioception."""
    config = WorldModelConfig(recipe.video, recipe.action, channels, sim_condition=sim_condition)
    with torch.device("meta"):
        return WorldModel(config)


def text_parameters(source: str) -> int:
    """Parameters of a recipe's text encoder. `hashed-words` has none, and embeddings read from files need none."""
    if source == WAN_TEXT or source.startswith(PREFIX):
        return sum(shape.numel() for shape in parameter_shapes(UMT5_XXL, WAN_TEXT).values())
    return MINILM if source == MiniLM.name else 0


class LiveBytes(TorchDispatchMode):
    """Follows every storage that operations make inside the context; `peak` is the most bytes alive at once.

    Works on the meta device, where nothing is allocated. Workspaces inside kernels are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: int = 0
        self.peak: int = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation and counts what it made; a view of what was there before is nothing new."""
        result = func(*args, **(kwargs or {}))
        given = {s._cdata for s in _storages((args, kwargs))}
        for storage in _storages(result):
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known and key not in given:
                self._known.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, key, size)
        return result

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def codec_peak(codec: Codec, rule: ClipRule, clips: int, decode: bool) -> int:
    """Bytes alive at once while clips are encoded or decoded in float32, besides the (meta) codec's weights."""
    shape: tuple[int, ...] = (3, rule.frames, rule.height, rule.width)
    if decode:
        shape = codec.latent_shape(*shape[1:])
    with torch.no_grad(), LiveBytes() as followed:
        (codec.decode if decode else codec.encode)(torch.empty(clips, *shape, device="meta"))
    peak: int = followed.peak
    return peak


# -- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Bytes on one GPU in one stage.

    weights: float32 masters (inference: in the computing type). copies: weights in the computing type, whole (none,
    DDP) or of what is gathered at once (FSDP2), with the gradients that wait to be reduced. teacher: the frozen one.
    """

    stage: str
    sharding: Sharding
    checkpointing: bool
    clips: int  # a GPU
    weights: int
    gradients: int
    optimiser: int
    copies: int
    teacher: int
    activations: int

    @property
    def total(self) -> int:
        """The sum: an upper estimate, since gradients are complete only when activations are gone."""
        return self.weights + self.gradients + self.optimiser + self.copies + self.teacher + self.activations

    def fits(self, gpu_gib: float) -> bool:
        """Whether the total and the reserve are below a GPU's memory."""
        return self.total * (1 + RESERVE_SHARE) / GIB + RESERVE_GIB <= gpu_gib


@dataclass(frozen=True)
class Memory:
    """A recipe on `gpus` GPUs. `batch`: clips a GPU and step; None takes the recipe's. `lora`: rank of a student that
    trains adapters, which gets rows of its own.

    Raises:
        SimForcingError: there is no such codec, or fewer than one GPU or clip.
    """

    recipe: Recipe
    gpus: int = 1
    batch: int | None = None
    compute: Compute = "bfloat16"
    lora: int | None = None

    def __post_init__(self) -> None:
        if self.lora is not None and self.lora < 1:
            raise SimForcingError(f"rank {self.lora} of adapters: give at least 1")
        if self.gpus < 1:
            raise SimForcingError(f"{self.gpus} GPUs: memory is computed for at least 1")
        if self.batch is not None and self.batch < 1:
            raise SimForcingError(f"batch size {self.batch}: a step needs at least one clip")

    @cached_property
    def codec(self) -> Codec:
        """On the meta device."""
        return meta_codec(self.recipe.codec)

    @cached_property
    def shapes(self) -> Shapes:
        """Of one clip."""
        return Shapes.of(self.recipe, self.codec)

    @cached_property
    def student(self) -> WorldModel:
        """The whole model, on the meta device."""
        return meta_model(self.recipe, self.codec.channels, sim_condition=True)

    @property
    def arithmetic(self) -> Arithmetic:
        """On a GPU."""
        return Arithmetic(BYTES[self.compute])

    def parameters(self) -> dict[str, int]:
        """Numbers of parameters; `unused`: those of the action expert that no output depends on, hence not trained."""
        model, codec = self.student, self.codec
        assert model.sim is not None
        return {
            "video expert": count(model.video),
            "action expert": count(model.action),
            "proprioception encoder": count(model.proprio),
            "simulation projections": count(model.sim),
            "unused": sum(p.numel() for _, p in model.unused_parameters()),
            "codec": count(codec),
            "text encoder": text_parameters(self.recipe.text),
        }

    def weights(self, stage: Stage) -> tuple[int, int]:
        """All parameters of the model that a stage trains, and those that get a gradient."""
        model = self.student
        total = count(model) - (0 if stage == "student" or model.sim is None else count(model.sim))
        return total, total - sum(p.numel() for _, p in model.unused_parameters())

    def clips(self, stage: Stage) -> tuple[int, int]:
        """Clips a GPU and step, and how many go through the trained model: a student's pairs are two."""
        batch = self.recipe.training(stage).batch_size if self.batch is None else self.batch
        share = self.recipe.objective.syn_share if stage == "student" else 0.0
        return batch, batch + (max(1, round(share * batch)) if stage == "student" else 0)

    @cached_property
    def rows(self) -> list[Row]:
        """Every stage in every way to train it, and inference of one clip."""
        ways: tuple[Sharding, ...] = ("none",) if self.gpus == 1 else ("DDP", "FSDP2")
        rows = [self.row(stage, way, cp) for stage in STAGES for way in ways for cp in (False, True)]
        adapted = [] if self.lora is None else [self.adapters(self.lora, ways[0], cp) for cp in (False, True)]
        return [*rows, *adapted, self.inference()]

    def row(self, stage: Stage, sharding: Sharding, checkpointing: bool) -> Row:
        """One stage trained in one way."""
        total, trained = self.weights(stage)
        shards = self.gpus if sharding == "FSDP2" else 1
        batch, through = self.clips(stage)
        student = stage == "student"
        args = (self.recipe, self.shapes, self.arithmetic)
        kept = activations(*args, through, checkpointing, batch if student else 0) + backward_work(*args, through)
        frozen = self.weights("teacher")[0] if student else 0
        teacher = math.ceil(frozen / shards) * self.arithmetic.item
        return Row(
            stage,
            sharding,
            checkpointing,
            batch,
            weights=math.ceil(total / shards) * FLOAT,
            gradients=math.ceil(trained / shards) * FLOAT,
            optimiser=math.ceil(trained / shards) * 2 * FLOAT,
            copies=self._copies(total, sharding),
            teacher=teacher,
            activations=max(kept, forward_work(*args, batch) if student else 0),
        )

    def adapters(self, rank: int, sharding: Sharding, checkpointing: bool) -> Row:
        """A student that trains adapters: it and its teacher hold the projections of the blocks once, in `compute`.

        Activations are those of a whole student, and what every adapter's first product keeps.
        """
        model = meta_model(self.recipe, self.codec.channels, sim_condition=True)
        with torch.device("meta"):
            add_adapters(model, rank, dtype=COMPUTE_DTYPE[self.compute])
        whole = self.row("student", sharding, checkpointing)
        parameters = list(model.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        frozen = sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)
        shared = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if MARK in n)
        thin = sum(isinstance(m, Adapted) for m in model.video.modules()) * rank * self.shapes.tokens
        kept = 0 if checkpointing else self.clips("student")[1] * thin * self.arithmetic.item
        return replace(
            whole,
            stage="adapters",
            weights=frozen + trained * FLOAT,
            gradients=trained * FLOAT,
            optimiser=2 * trained * FLOAT,
            copies=0 if self.arithmetic.item == FLOAT else trained * self.arithmetic.item,
            teacher=self.weights("teacher")[0] * self.arithmetic.item - shared,
            activations=whole.activations + kept,
        )

    def _copies(self, total: int, sharding: Sharding) -> int:
        """FSDP2 by block: what is outside the blocks is gathered throughout, and of the blocks one pair in use and one
        on its way; gradients of one pair in the computing type, and in float32 while they are reduced.
        """
        item = self.arithmetic.item
        if sharding != "FSDP2":
            return 0 if item == FLOAT else total * item
        model = self.student
        pair = count(model.video.layers[0]) + count(model.action.layers[0])
        outside = total - self.recipe.video.num_layers * pair
        return outside * item + 2 * pair * item + pair * (item + FLOAT)

    def inference(self) -> Row:
        """A guided rollout of one clip, two branches as one batch; then its latents are decoded."""
        args = (self.recipe, self.shapes, self.arithmetic)
        denoising = forward_work(*args, 2) + sim_residuals(self.recipe.video, self.shapes, self.arithmetic)
        decoding = codec_peak(self.codec, self.recipe.rule, 1, decode=True)
        weights = count(self.student) * self.arithmetic.item + count(self.codec) * FLOAT
        return Row("inference", "none", False, 1, weights, 0, 0, 0, 0, max(denoising, decoding))

    def encoding(self) -> dict[str, int]:
        """Bytes while a dataset is encoded: the codec in float32 on a shard of clips, the text encoder in `compute`.

        What the text encoder computes on one prompt at a time is little beside its weights and left out.
        """
        return {
            "codec weights": count(self.codec) * FLOAT,
            f"codec activations, {SHARD} clips at once": codec_peak(self.codec, self.recipe.rule, SHARD, decode=False),
            "text encoder weights": text_parameters(self.recipe.text) * self.arithmetic.item,
        }

    def disk(self, windows: int) -> dict[str, int]:
        """Bytes on disk. Latents are float16, of both domains; a checkpoint holds float32 weights and both moments."""
        total, trained = self.weights("student")
        checkpoint = total * FLOAT + 2 * trained * FLOAT
        return {
            f"latents of {windows} windows": windows * 2 * self.shapes.latent * 2,
            "one checkpoint of a student": checkpoint,
            f"the last {KEEP}, the best and one being written": (KEEP + 2) * checkpoint,
            "the trained model": total * FLOAT,
        }

    def cheapest(self, gpu_gib: float) -> Iterator[tuple[str, Row | None]]:
        """Per stage the way that fits with the least work: without checkpointing before with, DDP before FSDP2."""
        for stage in (*STAGES, *([] if self.lora is None else ["adapters"]), "inference"):
            rows = sorted((r for r in self.rows if r.stage == stage), key=lambda r: r.checkpointing)
            yield stage, next((r for r in rows if r.fits(gpu_gib)), None)
