"""Video to latents and back.

Legend: B batch, T pixel frames (1 + 4 n), F latent frames (1 + n), C latent channels, H W pixels, h w latent grid.

Two codecs with one interface: the causal VAE of Wan2.2-TI2V-5B (diffusers), and a small one that a laptop can run.
Both are causal with a temporal stride of 4 and encode the first frame alone.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as functional
from einops import rearrange
from jaxtyping import Float, UInt8
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from simforcing.errors import InputError, SimForcingError
from simforcing.files import partial_path
from simforcing.model.wan_vae import read_vae
from simforcing.model.weights import is_torch_file

BUNDLED = "bundled"


def to_unit(frames: UInt8[Tensor, "B T H W 3"]) -> Float[Tensor, "B 3 T H W"]:
    """Pixels 0..255 to [-1, 1]."""
    return rearrange(frames, "b t h w c -> b c t h w").float() / 127.5 - 1


def to_pixels(video: Float[Tensor, "B 3 T H W"]) -> UInt8[Tensor, "B T H W 3"]:
    """[-1, 1] (clamped) to pixels 0..255, rounded to the nearest."""
    pixels = ((video.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return rearrange(pixels, "b c t h w -> b t h w c")


class Codec(nn.Module, ABC):
    """Video in [-1, 1] to normalised latents and back."""

    channels: int
    spatial_stride: int
    temporal_stride: ClassVar[int] = 4

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """C, F, h, w of a video.

        Raises:
            InputError: frames is not 1 + 4 n, or a side is not a multiple of the stride.
        """
        if frames < 1 or (frames - 1) % self.temporal_stride:
            raise InputError(f"{frames} frames: the codec takes 1 + {self.temporal_stride} n, such as 13, 21 or 33")
        if height % self.spatial_stride or width % self.spatial_stride:
            raise InputError(f"{height}x{width} pixels: both must be multiples of {self.spatial_stride}")
        return (
            self.channels,
            1 + (frames - 1) // self.temporal_stride,
            height // self.spatial_stride,
            width // self.spatial_stride,
        )

    @abstractmethod
    def encode(self, video: Float[Tensor, "B 3 T H W"]) -> Float[Tensor, "B C F h w"]:
        """Normalised latents (about unit variance)."""

    @abstractmethod
    def decode(self, latents: Float[Tensor, "B C F h w"]) -> Float[Tensor, "B 3 T H W"]:
        """Inverse of `encode`, as far as the codec reaches; not clamped."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What a cache or a run must agree on to use these latents."""


@dataclass(frozen=True)
class TinyCodecConfig:
    """Sizes of the small codec."""

    channels: int = 40
    stride: int = 8
    encoder_widths: tuple[int, ...] = (32, 64, 96)
    decoder_widths: tuple[int, ...] = (96, 64, 48)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The input and its correction, [N, width, H, W] both."""
        y: Tensor = self.second(functional.silu(self.first(functional.silu(self.norm(x)))))
        return x + y


class TinyCodec(Codec):
    """A linear projection of 4 x 8 x 8 blocks (fitted in closed form), and convolutions that correct it.

    A latent frame holds four pixel frames; the first one holds the first frame four times, so that what does not move
    has the same latent everywhere. The decoder sees the latent before, hence is causal.
    """

    def __init__(self, config: TinyCodecConfig = TinyCodecConfig()) -> None:
        super().__init__()
        self.config = config
        self.channels, self.spatial_stride = config.channels, config.stride
        block = 3 * self.temporal_stride * config.stride**2
        self.mean = nn.Parameter(torch.zeros(block))
        self.basis = nn.Parameter(torch.zeros(config.channels, block))
        self.shift: Tensor
        self.scale: Tensor
        self.register_buffer("shift", torch.zeros(config.channels))
        self.register_buffer("scale", torch.ones(()))
        self.encoder = self._make_encoder(config)
        self.decoder = self._make_decoder(config)

    def _make_encoder(self, config: TinyCodecConfig) -> nn.Sequential:
        layers: list[nn.Module] = []
        before = 3 * self.temporal_stride
        for width in config.encoder_widths:
            layers += [nn.Conv2d(before, width, 4, stride=2, padding=1), nn.SiLU()]
            before = width
        last = nn.Conv2d(before, config.channels, 3, padding=1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)  # type: ignore[arg-type]
        return nn.Sequential(*layers, _Residual(before), last)

    def _make_decoder(self, config: TinyCodecConfig) -> nn.Sequential:
        first, *rest = config.decoder_widths
        layers: list[nn.Module] = [
            nn.Conv2d(2 * config.channels, first, 3, padding=1),
            _Residual(first),
            _Residual(first),
        ]
        before = first
        for width in rest:
            layers += [nn.Conv2d(before, 4 * width, 3, padding=1), nn.PixelShuffle(2), _Residual(width)]
            before = width
        last = nn.Conv2d(before, 4 * 3 * self.temporal_stride, 3, padding=1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)  # type: ignore[arg-type]
        return nn.Sequential(*layers, nn.SiLU(), last, nn.PixelShuffle(2))

    def chunks(self, video: Float[Tensor, "B 3 T H W"]) -> Float[Tensor, "B F 12 H W"]:
        """Groups of four frames as channels; the first frame four times, then the following frames."""
        padded = torch.cat([video[:, :, :1]] * (self.temporal_stride - 1) + [video], dim=2)
        return rearrange(padded, "b c (f t) h w -> b f (c t) h w", t=self.temporal_stride)

    def blocks(self, chunks: Float[Tensor, "N 12 H W"]) -> Float[Tensor, "N h w block"]:
        """Flattened 4 x 8 x 8 colour blocks, what the linear projection sees."""
        s = self.config.stride
        blocks: Tensor = rearrange(chunks, "n c (h p) (w q) -> n h w (c p q)", p=s, q=s)
        return blocks

    def encode_chunks(self, chunks: Float[Tensor, "N 12 H W"]) -> Float[Tensor, "N C h w"]:
        """Normalised latents of single chunks."""
        linear = functional.linear(self.blocks(chunks) - self.mean, self.basis).movedim(-1, 1)
        latents: Tensor = (linear + self.encoder(chunks) - self.shift[:, None, None]) / self.scale
        return latents

    def decode_chunks(
        self, before: Float[Tensor, "N C h w"], latents: Float[Tensor, "N C h w"]
    ) -> Float[Tensor, "N 12 H W"]:
        """Four frames from a latent and the one before it."""
        z, past = (x * self.scale + self.shift[:, None, None] for x in (latents, before))
        s = self.config.stride
        flat = functional.linear(z.movedim(1, -1), self.basis.t()) + self.mean
        linear: Tensor = rearrange(flat, "n h w (c p q) -> n c (h p) (w q)", p=s, q=s)
        correction: Tensor = self.decoder(torch.cat([z, past], dim=1))
        frames: Tensor = linear + correction
        return frames

    def encode(self, video: Float[Tensor, "B 3 T H W"]) -> Float[Tensor, "B C F h w"]:
        """See `Codec.encode`."""
        self.latent_shape(*video.shape[2:])
        chunks = self.chunks(video)
        latents: Tensor = self.encode_chunks(chunks.flatten(0, 1)).unflatten(0, chunks.shape[:2])
        return latents.transpose(1, 2)

    def decode(self, latents: Float[Tensor, "B C F h w"]) -> Float[Tensor, "B 3 T H W"]:
        """See `Codec.decode`."""
        z = latents.transpose(1, 2)
        before = torch.cat([z[:, :1], z[:, :-1]], dim=1)
        chunks = self.decode_chunks(before.flatten(0, 1), z.flatten(0, 1)).unflatten(0, z.shape[:2])
        video: Tensor = rearrange(chunks, "b f (c t) h w -> b c (f t) h w", t=self.temporal_stride)
        return video[:, :, self.temporal_stride - 1 :]

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes, and a fingerprint of all weights that latents depend on, as `save` rounds them."""
        digest = hashlib.sha256()
        for name, value in sorted(self.state_dict().items()):
            if not name.startswith("decoder."):
                digest.update(name.encode() + value.half().cpu().contiguous().numpy().tobytes())
        return {
            "codec": "tiny",
            **json.loads(json.dumps(asdict(self.config))),
            "fingerprint": digest.hexdigest()[:16],
        }

    def save(self, path: Path) -> None:
        """Writes one safetensors file, half precision, sizes in its header."""
        partial = partial_path(path)
        state = {k: v.detach().half().contiguous() for k, v in self.state_dict().items()}
        save_file(state, partial, metadata={"config": json.dumps(asdict(self.config))})
        partial.rename(path)

    @classmethod
    def load(cls, path: Path) -> "TinyCodec":
        """Reads what `save` wrote.

        Raises:
            SimForcingError: the file is not a small codec, or is damaged.
        """
        try:
            with safe_open(path, "pt") as file:
                header = json.loads((file.metadata() or {})["config"])
            sizes: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in header.items()}
            codec = cls(TinyCodecConfig(**sizes))
            codec.load_state_dict({k: v.float() for k, v in load_file(path).items()})
        except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise SimForcingError(f"{path} is not a codec of this package: {reason}") from error
        return codec.eval().requires_grad_(False)


class WanCodec(Codec):
    """The VAE of Wan2.2-TI2V-5B: 4 x 16 x 16, 48 channels; posterior mean, normalised by its published constants."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae
        self.channels = vae.config.z_dim
        self.spatial_stride = 8 * (vae.config.patch_size or 1)
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1))
        self.register_buffer("std", torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1))

    def encode(self, video: Float[Tensor, "B 3 T H W"]) -> Float[Tensor, "B C F h w"]:
        """See `Codec.encode`."""
        self.latent_shape(*video.shape[2:])
        latents: Tensor = self.vae.encode(video.to(self.vae.dtype)).latent_dist.mode().float()
        return (latents - self.mean) / self.std

    def decode(self, latents: Float[Tensor, "B C F h w"]) -> Float[Tensor, "B 3 T H W"]:
        """See `Codec.decode`."""
        raw = latents.float() * self.std + self.mean
        video: Tensor = self.vae.decode(raw.to(self.vae.dtype)).sample
        return video.float()

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes, and a fingerprint of all weights that latents depend on; the same from either layout of the VAE."""
        return {
            "codec": "wan",
            "channels": self.channels,
            "stride": self.spatial_stride,
            "fingerprint": self._fingerprint,
        }

    @cached_property
    def _fingerprint(self) -> str:
        """Of the encoder's weights and the normalisation, in float32: as they were when first asked for."""
        digest = hashlib.sha256()
        encoding = {k: v for k, v in self.state_dict().items() if not k.startswith(("vae.decoder.", "vae.post_"))}
        for name, value in sorted(encoding.items()):
            digest.update(name.encode())
            digest.update(memoryview(value.float().cpu().contiguous().numpy()).cast("B"))
        return digest.hexdigest()[:16]


def load_codec(source: str | Path = BUNDLED) -> Codec:
    """The codec at `source`, in float32.

    `source`: `bundled`, a file of the small codec, a directory with diffusers' `AutoencoderKLWan`, or an original
    `Wan2.2_VAE.pth`.

    Raises:
        SimForcingError: there is no codec at `source`, or it is damaged.
    """
    if str(source) == BUNDLED:
        return TinyCodec.load(Path(str(files("simforcing") / "assets" / "codec.safetensors")))
    path = Path(source)
    if path.is_dir() or (path.is_file() and is_torch_file(path)):
        return WanCodec(read_vae(path).float())
    if path.is_file():
        return TinyCodec.load(path)
    raise SimForcingError(
        f"no codec at {source}: give '{BUNDLED}', a .safetensors file, a directory of AutoencoderKLWan or its .pth"
    )
