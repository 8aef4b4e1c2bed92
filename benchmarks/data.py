"""Times training epochs from a cache against encoding in the loop, and windows of a video against the whole of it.

    python benchmarks/data.py            one thread, under 60 s
    python benchmarks/data.py --json     the same rows as JSON
    python benchmarks/data.py --full     five rounds

`epoch` rows are seconds a clip of an epoch of the demo's student (batch 8, paired clips of 13 frames of 64 x 64): plain
decodes both views and encodes them before each step, ours reads latents from the cache. `wan` encodes with the encoder
of Wan2.2's VAE at its true channel sizes (random weights; 13 x 64 x 64 is 3.5 % of the pixels of a Bridge clip, so the
time is measured and not extrapolated), `bundled` with the small codec. `window` rows are seconds to get 21 frames of
a video of 600 frames of 224 x 320 by their times: plain decodes the video and keeps them. The video has a keyframe
every 8 frames, as we write it, or every 250, as is usual elsewhere. All in turn, medians.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import Row, median, show
from torch.utils.flop_counter import FlopCounterMode

from simforcing.data import video as video_format
from simforcing.data.cache import open_cache
from simforcing.data.episode import REAL, SIM, Dataset
from simforcing.data.formats import open_dataset
from simforcing.data.lerobot_writer import LeRobotWriter
from simforcing.data.video import VideoFile, VideoWriter
from simforcing.data.windows import load_clip
from simforcing.model.codec import Codec, load_codec, to_unit
from simforcing.recipes import recipe
from simforcing.train.batches import LatentClips, from_cache
from simforcing.train.encode import encode_dataset
from simforcing.train.objective import Batch, draw, student_loss
from simforcing.train.roles import new_model, new_preparation, student_of

FOUND = recipe("tiny")  # the demo's, without a text model
BATCH = 8
BRIDGE = (21, 224, 320)
WAN_VAE = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
    "temperal_downsample": [False, True, True], "is_residual": True, "in_channels": 12, "out_channels": 12,
    "patch_size": 2, "scale_factor_temporal": 4, "scale_factor_spatial": 16,
}  # fmt: skip


def wan_vae(device: str) -> Any:
    """The encoding half of Wan2.2's VAE, random weights; on `meta` it only counts."""
    from diffusers import AutoencoderKLWan

    with torch.device("meta"):
        vae = AutoencoderKLWan(**WAN_VAE, latents_mean=[0.0] * 48, latents_std=[1.0] * 48)
    vae.decoder = torch.nn.Identity()
    if device != "meta":
        vae = vae.to_empty(device=device)
        for p in vae.parameters():
            torch.nn.init.normal_(p, std=0.02)
    return vae.eval().requires_grad_(False)


def encode_operations(frames: int, height: int, width: int) -> float:
    """Floating-point operations to encode one clip."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        wan_vae("meta").encode(torch.empty(1, 3, frames, height, width, device="meta"))
    return float(counter.get_total_flops())


def moving(count: int, height: int, width: int, phase: float = 0.0) -> np.ndarray:
    """Smooth pictures that move."""
    y, x = np.mgrid[0:height, 0:width] / height
    waves = [np.stack([np.sin(5 * x + 0.1 * i + phase), np.cos(4 * y - 0.07 * i), x * y], -1) for i in range(count)]
    return (127 + 100 * np.array(waves)).astype(np.uint8)


def paired(root: Path, episodes: int = 4, rows: int = 60) -> Dataset:
    """A small paired dataset of the demo's size."""
    names, rng = tuple("abcdefg"), np.random.default_rng(0)
    with LeRobotWriter(root, fps=5.0, robot="none", cameras={REAL: (64, 64), SIM: (64, 64)}, state_names=names,
                       action_names=names) as writer:  # fmt: skip
        for k in range(episodes):
            state, action = rng.normal(size=(2, rows, 7)).astype(np.float32)
            writer.add_episode({REAL: moving(rows, 64, 64, k), SIM: moving(rows, 64, 64, k + 1)}, state, action, "move")
    return open_dataset(root)


class Epoch:
    """The demo's student on one cache: a step, and what goes before it."""

    def __init__(self, root: Path) -> None:
        self.dataset = paired(root / "pairs")
        self.codec = load_codec(FOUND.codec)
        encode_dataset(self.dataset, root / "cache", self.codec, FOUND.rule, every=FOUND.window_every)
        cache = open_cache(root / "cache", {})
        preparation = new_preparation(FOUND, cache.header, cache["action"], cache["proprio"])
        self.clips: LatentClips = from_cache(cache, cache.header["tasks"], preparation)
        self.teacher = new_model(FOUND, preparation, self.codec.channels, seed=0).eval().requires_grad_(False)
        self.model = student_of(new_model(FOUND, preparation, self.codec.channels, seed=0)).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def train(self, batch: Batch, step: int) -> None:
        draws = draw(self.model, batch.latents, FOUND.objective, torch.Generator().manual_seed(step))
        student_loss(self.model, self.teacher, batch, draws, FOUND.objective)["total"].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def pictures(self, step: int) -> dict[str, torch.Tensor]:
        """Both views of one batch, decoded as a loader without a cache decodes them."""
        rows = self.clips.rows(BATCH, 0, step)
        names = [(int(self.clips.episode[r]), int(self.clips.start[r])) for r in rows]
        clips = [load_clip(self.dataset[e], s, FOUND.rule, (REAL, SIM)) for e, s in names]
        return {key: to_unit(torch.from_numpy(np.stack([c.frames[key] for c in clips]))) for key in (REAL, SIM)}


def timed(f: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds, and what was returned."""
    began = time.perf_counter()
    result = f(*arguments)
    return time.perf_counter() - began, result


@torch.inference_mode()
def encoded(codec: Codec | Any, videos: dict[str, torch.Tensor]) -> None:
    for video in videos.values():
        codec.encode(video)


def epochs(root: Path, rounds: int) -> list[Row]:
    """Seconds a clip, in turn. The slow encoder takes one clip of a batch, whose cost does not depend on the others."""
    epoch, wan = Epoch(root), wan_vae("cpu")
    times: dict[str, list[float]] = defaultdict(list)
    epoch.train(epoch.clips.batch(BATCH, 0, 0), 0)
    for i in range(1, rounds + 1):
        read, batch = timed(epoch.clips.batch, BATCH, 0, i)
        decode, videos = timed(epoch.pictures, i)
        found = {"read": read, "decode": decode, "step": timed(epoch.train, batch, i)[0]}
        found["bundled"] = timed(encoded, epoch.codec, videos)[0]
        for name, value in found.items():
            times[name].append(value / BATCH)
        times["wan"].append(timed(encoded, wan, {key: video[:1] for key, video in videos.items()})[0])
    t = {name: median(values) for name, values in times.items()}
    ours = t["read"] + t["step"]
    threads = torch.get_num_threads()
    return [
        Row(f"epoch {n}", "float32", threads, BATCH, t["decode"] + t[n] + t["step"], ours) for n in ("wan", "bundled")
    ]


def video(path: Path, keyframes: int) -> VideoFile:
    """600 frames of 224 x 320 with a keyframe every so many."""
    frames = np.concatenate([moving(100, 224, 320, phase=start) for start in range(0, 600, 100)])
    with patch.object(video_format, "GOP", keyframes):
        writer = VideoWriter(path, fps=5.0, height=224, width=320)
    writer.write(frames)
    writer.close()
    return VideoFile(path, 5.0)


def window_rows(root: Path, rounds: int) -> list[Row]:
    rng, rows = np.random.default_rng(0), []
    every = [i / 5.0 for i in range(600)]
    for keyframes in (8, 250):
        file = video(root / f"{keyframes}.mp4", keyframes)
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            start = int(rng.integers(0, 580))
            wanted = every[start : start + 21]
            spent, window = timed(file.at, wanted)
            times["ours"].append(spent)
            spent, whole = timed(file.at, every)
            times["plain"].append(spent)
            if not np.array_equal(window, whole[start : start + 21]):
                sys.exit("a window differs from the same frames of the whole video: nothing to compare")
        rows.append(Row(f"window key/{keyframes}", "uint8", 1, 1, median(times["plain"]), median(times["ours"])))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="rows as JSON on standard output")
    parser.add_argument("--full", action="store_true", help="five rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 5 if options.full else 2
    began = time.perf_counter()
    here, bridge = encode_operations(FOUND.rule.frames, FOUND.rule.height, FOUND.rule.width), encode_operations(*BRIDGE)
    with tempfile.TemporaryDirectory() as folder:
        rows = window_rows(Path(folder), rounds + 1) + epochs(Path(folder), rounds)
    notes = [
        f"encoding one Bridge clip of both views takes {2 * bridge / 1e12:.1f} TFLOP with Wan2.2's encoder, "
        f"{bridge / here:.0f} times the demo's clip; "
        f"a step of the 5 B student takes about {7 * 2 * 5e9 * 420 / 1e12:.0f} (7 forwards of 420 tokens), so there "
        "encoding in the loop costs a third more and not many times as much",
        f"{time.perf_counter() - began:.0f} s",
    ]
    show(rows, notes, options.json)


if __name__ == "__main__":
    main()
