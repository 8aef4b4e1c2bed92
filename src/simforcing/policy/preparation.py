"""What a policy's network is given of the world: pictures of all cameras side by side, numbers, words.

Legend: B batch, H W stored pixels of a camera, h w pixels of a camera in the network's picture, K cameras.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from jaxtyping import Float32, UInt8
from torch import Tensor

from simforcing.data.episode import nearest
from simforcing.errors import InputError
from simforcing.model.preparation import Preparation
from simforcing.model.text import Domain

DOMAIN: Domain = "default"
"""Whose prompt template a policy reads: the one that says of a video neither that it is real nor simulated."""


@dataclass(frozen=True)
class PolicyPreparation(Preparation):
    """Also says which cameras a policy looks at, from left to right.

    cameras: height and width of each in the recordings; what it looks at may have any size of the same shape.
    `rule` is about all of them side by side: each gets an equal part of its width.
    """

    cameras: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pairs = {name: (int(height), int(width)) for name, (height, width) in self.cameras.items()}
        object.__setattr__(self, "cameras", pairs)  # tuples, also where they were read from a file

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of one camera in the network's picture."""
        return self.rule.height, self.rule.width // max(1, len(self.cameras))

    def picture(self, images: Mapping[str, UInt8[np.ndarray, "B H W 3"]]) -> Float32[Tensor, "B 3 h K*w"]:
        """What all cameras see, in [-1, 1], for the codec.

        Raises:
            InputError: a camera is missing or unknown, or its pictures are not uint8 RGB of its shape.
        """
        if set(images) != set(self.cameras):
            wrong = sorted(set(images) - set(self.cameras))
            hint = f"; no camera {wrong[0]!r}, {nearest(wrong[0], self.cameras)}" if wrong else ""
            raise InputError(f"images of {_listed(images)}: this policy looks at {_listed(self.cameras)}{hint}")
        views = [images[name] for name in self.cameras]
        for (name, (height, width)), view in zip(self.cameras.items(), views, strict=True):
            check_view(name, view)
            count, found = len(view), view.shape[1:3]
            if count != len(views[0]):
                raise InputError(f"images of {name}: {count} pictures, the first camera has {len(views[0])}")
            if found[0] * width != found[1] * height:
                raise InputError(
                    f"images of {name} are {found[0]} x {found[1]} pixels, they must have the shape of the recorded "
                    f"{height} x {width}"
                )
        return side_by_side(views, *self.size)


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(names) or "no camera"


def check_view(name: str, view: Any) -> None:
    """Raises InputError for what is no array of uint8 RGB pictures [B, H, W, 3]."""
    if not isinstance(view, np.ndarray) or view.dtype != np.uint8 or view.ndim != 4 or view.shape[3] != 3:
        kind = f"{view.dtype} {list(view.shape)}" if isinstance(view, np.ndarray) else type(view).__name__
        raise InputError(f"images of {name} are {kind}, they must be uint8 [B, H, W, 3], RGB with the top row first")


def side_by_side(
    views: Sequence[UInt8[np.ndarray, "B H W 3"]], height: int, width: int
) -> Float32[Tensor, "B 3 {height} K*{width}"]:
    """Pictures in [-1, 1], each camera resized on its own (bilinear with antialiasing, in float32), then joined.

    As FastWAM trains. (It evaluates with Pillow's resizing, rounded to 8 bits; here both are this function.)
    """

    def resized(view: UInt8[np.ndarray, "B H W 3"]) -> Tensor:
        pixels = torch.from_numpy(np.ascontiguousarray(view)).movedim(-1, 1).float()
        if pixels.shape[2:] != (height, width):
            pixels = functional.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
        return pixels / 127.5 - 1

    return torch.cat([resized(view) for view in views], dim=3)
