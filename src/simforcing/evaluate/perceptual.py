"""Metrics that look through a network: LPIPS a clip, FID and FVD of a set of clips.

Legend: B clips, T frames, H W pixels, n m samples, D features, S scored frames.

Videos are uint8 RGB, ``B T H W 3``, values 0..255. Frame 0 is given to the model, so it is left out unless
``first_frame=True`` (for comparison with papers that count it). Every clip goes through a network by itself, so no
number depends on how clips are batched. All frames are taken at their own size and rate; what a network resizes is
said at its metric. Weights: `networks`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from simforcing.errors import SimForcingError
from simforcing.evaluate.metrics import PerClip, Videos, scored_clips
from simforcing.evaluate.networks import Networks, Unavailable
from simforcing.model.codec import Codec, to_unit

Features: TypeAlias = Float64[np.ndarray, "n D"]

MINIMUM_CLIPS = 16
"""Clips below which a distance between sets is refused. With fewer clips than features it is still biased upwards:
compare only numbers from equally many clips."""
I3D_FRAMES = 10
"""Frames that the field's I3D needs at least."""
LPIPS_PIXELS = 32
"""Shortest side that AlexNet's and VGG's layers accept."""
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""LPIPS' own normalisation of [-1, 1]."""

_ALEX = ((64, 11, 4, 2), "pool", (192, 5, 1, 2), "pool", (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1))
_VGG = tuple(
    layer
    for i, (width, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)))
    for layer in ((() if i == 0 else ("pool",)) + ((width, 3, 1, 1),) * count)
)


def _stack(layers: Sequence[Any], pool: int) -> nn.Sequential:
    """Convolutions with ReLU, and pooling; indices are those of torchvision's `features`."""
    modules: list[nn.Module] = []
    channels = 3
    for layer in layers:
        if layer == "pool":
            modules.append(nn.MaxPool2d(pool, 2))
            continue
        width, kernel, stride, padding = layer
        modules += [nn.Conv2d(channels, width, kernel, stride, padding), nn.ReLU()]
        channels = width
    return nn.Sequential(*modules)


@dataclass(frozen=True)
class _Trunk:
    network: str
    heads: str
    build: Callable[[], nn.Sequential]
    taps: tuple[int, ...]  # indices of the layers whose output is compared


TRUNKS: dict[str, _Trunk] = {
    "alex": _Trunk("alexnet", "lpips-alex", partial(_stack, _ALEX, 3), (1, 4, 7, 9, 11)),
    "vgg": _Trunk("vgg16", "lpips-vgg", partial(_stack, _VGG, 2), (3, 8, 15, 22, 29)),
}


class Lpips:
    """Learned perceptual image patch similarity, version 0.1 with linear heads; 0 is identical, lower is better.

    A frame's RGB values v become v / 127.5 - 1, then LPIPS' own channel shift and scale; no resizing. Outputs of five
    ReLU layers of AlexNet or VGG-16 (ImageNet weights of torchvision) are normalised to unit length over channels
    (epsilon 1e-10), squared differences weighted by the heads, averaged over positions and summed over layers; mean
    over the scored frames of the clip. float32. Source: Zhang et al. 2018, package `lpips` 0.1.4.
    """

    def __init__(self, networks: Networks, trunk: Literal["alex", "vgg"] = "alex", device: str = "cpu") -> None:
        kind = TRUNKS[trunk]
        weights, heads = networks.state(kind.network), networks.state(kind.heads)
        self.names = (kind.network, kind.heads)
        self._taps, self._device = kind.taps, device
        layers = nn.Sequential(*list(kind.build())[: kind.taps[-1] + 1])
        prefix = "features."
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        wanted = layers.state_dict()
        missing = [k for k, v in wanted.items() if k not in own or own[k].shape != v.shape]
        if missing:
            raise SimForcingError(f"network {kind.network}: no weights '{prefix}{missing[0]}' of the right shape")
        layers.load_state_dict({k: own[k] for k in wanted})
        layers.requires_grad_(False).to(device)
        self._layers = list(layers)
        try:
            self._heads = [heads[f"lin{i}.model.1.weight"].to(device, torch.float32) for i in range(len(kind.taps))]
        except KeyError as error:
            raise SimForcingError(f"network {kind.heads}: no weights {error}") from None

    def __call__(self, pred: Videos, true: Videos, *, first_frame: bool = False) -> PerClip:
        """One value a clip.

        Raises:
            Unavailable: frames are too small.
            SimForcingError: videos do not fit each other.
        """
        if min(true.shape[2:4]) < LPIPS_PIXELS:
            raise Unavailable(
                f"LPIPS needs frames of at least {LPIPS_PIXELS}x{LPIPS_PIXELS} pixels, got {list(true.shape[2:4])}"
            )
        return np.array([float(self._frames(p, t).mean()) for p, t in scored_clips(pred, true, first_frame)])

    @torch.inference_mode()
    def _frames(self, pred: np.ndarray, true: np.ndarray) -> Float[Tensor, " S"]:
        total: Tensor | float = 0.0
        for a, b, head in zip(self._features(pred), self._features(true), self._heads, strict=True):
            total = total + (head * (a - b).square()).sum(1).mean((1, 2)).double()
        assert isinstance(total, Tensor)
        return total

    def _features(self, frames: np.ndarray) -> list[Tensor]:
        x = torch.from_numpy(frames.transpose(0, 3, 1, 2).astype(np.float32)).to(self._device) / 127.5 - 1
        x = (x - x.new_tensor(SHIFT).view(1, 3, 1, 1)) / x.new_tensor(SCALE).view(1, 3, 1, 1)
        found = []
        for i, layer in enumerate(self._layers):
            x = layer(x)
            if i in self._taps:
                found.append(x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10))
        return found


def frechet_distance(a: Features, b: Features) -> float:
    """Squared Fréchet distance between the Gaussians fitted to two sets of feature vectors; at least 0.

    ``|mean_a - mean_b|^2 + tr(A) + tr(B) - 2 tr((A B)^(1/2))`` with the unbiased covariances A and B, in float64. The
    last trace is the nuclear norm of ``X_a X_b^T / sqrt((n - 1)(m - 1))`` for centred samples X, so no root of a
    singular matrix is taken, and nothing is added to the diagonal.

    Raises:
        SimForcingError: fewer than two samples, unequal widths, or values that are not finite.
    """
    a, b = (np.asarray(x, dtype=np.float64) for x in (a, b))
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise SimForcingError(f"a Fréchet distance needs two tables of equal width, got {a.shape} and {b.shape}")
    if min(len(a), len(b)) < 2:
        raise SimForcingError(f"a Fréchet distance needs two samples of each, got {len(a)} and {len(b)}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise SimForcingError("a Fréchet distance needs finite features")
    means = a.mean(0), b.mean(0)
    x, y = ((s - m) / np.sqrt(len(s) - 1) for s, m in zip((a, b), means, strict=True))
    # The triangles of QR have the products of x and y at most as wide as the features: many samples stay cheap.
    small: list[np.ndarray] = [np.asarray(np.linalg.qr(s, mode="r")) for s in (x, y)]
    overlap = np.linalg.svd(np.matmul(small[0], small[1].T), compute_uv=False).sum()
    spread = np.square(x).sum() + np.square(y).sum()
    return max(0.0, float(np.square(means[0] - means[1]).sum() + spread - 2 * overlap))


class Frechet:
    """A Fréchet distance between the predicted and the true clips as sets, through some extractor of features."""

    name = "Fréchet distance"
    least_frames = 1
    names: tuple[str, ...] = ()
    """Networks in use."""

    def extract(self, frames: np.ndarray) -> Features:
        """Feature vectors of the scored frames ``S H W 3`` of one clip."""
        raise NotImplementedError

    def __call__(self, pred: Videos, true: Videos, *, first_frame: bool = False) -> float:
        """The distance.

        Raises:
            Unavailable: too few clips, or clips too short.
        """
        if len(true) < MINIMUM_CLIPS:
            raise Unavailable(f"{self.name} needs at least {MINIMUM_CLIPS} clips, got {len(true)}; evaluate more")
        scored = true.shape[1] - (0 if first_frame else 1)
        if scored < self.least_frames:
            raise Unavailable(f"{self.name} needs clips of {self.least_frames} scored frames, got {scored}")
        pairs = [(self.extract(p), self.extract(t)) for p, t in scored_clips(pred, true, first_frame)]
        return frechet_distance(*(np.concatenate(side) for side in zip(*pairs, strict=True)))


class Fid(Frechet):
    """Fréchet inception distance over all scored frames of all clips as one set of pictures; lower is better.

    2048 features of Inception-v3 (TensorFlow's weights of 2015-12-05, NVIDIA's TorchScript of them), which itself
    resizes 0..255 RGB to 299x299 (bilinear, without antialiasing) and scales it. Frames of one clip resemble each
    other, so the number is for comparison within one protocol. Source: Heusel et al. 2017.
    """

    name = "FID"

    def __init__(self, networks: Networks, device: str = "cpu") -> None:
        self.names = ("inception",)
        self._run = _Script(networks, "inception", device)

    def extract(self, frames: np.ndarray) -> Features:
        """One vector a frame."""
        return self._run(frames.transpose(0, 3, 1, 2), return_features=True)


class Fvd(Frechet):
    """Fréchet video distance over clips; lower is better.

    400 features (logits) of I3D trained on Kinetics-400, the TorchScript of StyleGAN-V, which scales 0..255 RGB to
    [-1, 1] and resizes to 224x224 (bilinear) itself (``rescale=True, resize=True, return_features=True``). One vector
    a clip from all its scored frames at their own rate, no windows. The script is the user's: see `Networks.script`.
    Source: Unterthiner et al. 2018; Skorokhodov et al. 2022.
    """

    name = "FVD"
    least_frames = I3D_FRAMES

    def __init__(self, networks: Networks, device: str = "cpu") -> None:
        self.names = ("i3d",)
        self._run = _Script(networks, "i3d", device)

    def extract(self, frames: np.ndarray) -> Features:
        """One vector."""
        video = frames.transpose(3, 0, 1, 2)[None]
        return self._run(video, rescale=True, resize=True, return_features=True)


class FrechetCodec(Frechet):
    """A stand-in under its own name where no network can be had: Fréchet distance of the codec's latent frames.

    Features of each latent frame after the first: mean and standard deviation of every channel over positions. It sees
    blur and wrong colours, not meaning, and compares with neither FID nor FVD. Needs a codec, no network. The whole
    clip is encoded; ``first_frame`` adds the first latent frame.
    """

    name = "Fréchet distance of codec latents"

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def __call__(self, pred: Videos, true: Videos, *, first_frame: bool = False) -> float:
        """The distance; raises like `Frechet`."""
        if len(true) < MINIMUM_CLIPS:
            raise Unavailable(f"{self.name} needs at least {MINIMUM_CLIPS} clips, got {len(true)}; evaluate more")
        skip = 0 if first_frame else 1
        pairs = [(self._latents(p, skip), self._latents(t, skip)) for p, t in scored_clips(pred, true, True)]
        return frechet_distance(*(np.concatenate(side) for side in zip(*pairs, strict=True)))

    @torch.inference_mode()
    def _latents(self, clip: np.ndarray, skip: int) -> Features:
        latents = self._codec.encode(to_unit(torch.from_numpy(np.ascontiguousarray(clip))[None]))[0, :, skip:]
        flat = latents.flatten(2).double()
        table: Features = torch.cat([flat.mean(2), flat.std(2)]).T.cpu().numpy()
        return table


class _Script:
    """A TorchScript network that maps pixels 0..255 to a table of features."""

    def __init__(self, networks: Networks, name: str, device: str) -> None:
        self._module, self._name, self._device = networks.script(name).to(device), name, device

    @torch.inference_mode()
    def __call__(self, pixels: np.ndarray, **options: bool) -> Features:
        x = torch.from_numpy(np.ascontiguousarray(pixels, dtype=np.float32)).to(self._device)
        try:
            found = self._module(x, **options)
        except RuntimeError as error:
            line = " ".join(str(error).split())[:200]
            raise SimForcingError(
                f"network {self._name} does not take {list(x.shape)} with {options}: {line}"
            ) from error
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(x):
            raise SimForcingError(f"network {self._name} gives no table of features, one row a sample")
        table: Features = found.double().cpu().numpy()
        return table


@dataclass(frozen=True)
class Perceptual:
    """The metrics with a network that are wanted, each made when it is first used.

    codec: for the stand-in `FrechetCodec`; None leaves it out.
    """

    networks: Networks = Networks()
    codec: Codec | None = None
    device: str = "cpu"

    @cached_property
    def _made(self) -> dict[str, "Lpips | Frechet | Unavailable"]:
        makers: dict[str, Callable[[], Lpips | Frechet]] = {
            "lpips_alex": lambda: Lpips(self.networks, "alex", self.device),
            "lpips_vgg": lambda: Lpips(self.networks, "vgg", self.device),
            "fid": lambda: Fid(self.networks, self.device),
            "fvd": lambda: Fvd(self.networks, self.device),
        }
        codec = self.codec
        if codec is not None:
            makers["frechet_codec"] = lambda: FrechetCodec(codec)
        found: dict[str, Lpips | Frechet | Unavailable] = {}
        for key, make in makers.items():
            try:
                found[key] = make()
            except Unavailable as reason:
                found[key] = reason
        return found

    def available(self) -> list[str]:
        """Keys of the metrics whose networks are there."""
        return [key for key, metric in self._made.items() if not isinstance(metric, Unavailable)]

    def hashes(self) -> Mapping[str, str]:
        """sha256 of every network's file that is in use, by its name."""
        used = [name for m in self._made.values() if not isinstance(m, Unavailable) for name in m.names]
        return {name: self.networks.sha256(name) for name in used}

    def measure(
        self, pred: Videos, true: Videos, *, first_frame: bool = False
    ) -> tuple[dict[str, PerClip], dict[str, float], dict[str, str]]:
        """Numbers a clip, numbers of the whole set, and the reason for each metric that cannot be measured."""
        per_clip: dict[str, PerClip] = {}
        whole: dict[str, float] = {}
        unavailable: dict[str, str] = {}
        for key, metric in self._made.items():
            try:
                if isinstance(metric, Unavailable):
                    raise metric
                if isinstance(metric, Lpips):
                    per_clip[key] = metric(pred, true, first_frame=first_frame)
                else:
                    whole[key] = metric(pred, true, first_frame=first_frame)
            except Unavailable as reason:
                unavailable[key] = str(reason)
        return per_clip, whole, unavailable
