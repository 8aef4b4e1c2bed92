"""Initialisation of the action expert, learning rate, normaliser."""

import numpy as np
import pytest
import torch
from torch import Tensor

from simforcing.data.stats import Normalizer
from simforcing.model.backbone import resize
from simforcing.train.checkpoint import Progress
from simforcing.train.loop import TrainConfig

Tensors = dict[str, Tensor]


def test_resize(extras: Tensors, resized: str) -> None:
    source, target = extras[f"resize.{resized}.src"], extras[f"resize.{resized}.dst"]
    torch.testing.assert_close(resize(source, target.shape), target, atol=2e-5, rtol=1e-4)


def test_learning_rate(extras: Tensors, total: str) -> None:
    config = TrainConfig(steps=int(total))
    released = extras[f"lr.total{total}"].tolist()
    assert len(released) >= int(total)
    ours = [config.lr * config.rate(Progress(step)) for step in range(len(released))]
    assert ours == pytest.approx(released, rel=1e-6)


def test_normaliser(extras: Tensors) -> None:
    """To the bit."""
    normalizer = Normalizer.fit(extras["norm.data"].numpy())
    for name in ("min", "max", "scale", "offset"):
        np.testing.assert_array_equal(getattr(normalizer, name), extras[f"norm.{name}"].numpy())
    np.testing.assert_array_equal(normalizer.normalize(extras["norm.x"].numpy()), extras["norm.y"].numpy())
