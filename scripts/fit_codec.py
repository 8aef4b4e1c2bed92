"""Fits the small codec that ships with the package, on the bundled world.

    python scripts/fit_codec.py --out src/simforcing/assets/codec.safetensors --minutes 10
    python scripts/fit_codec.py --out src/simforcing/assets/codec.safetensors --minutes 40 --refine

First the linear projection in closed form (principal components of 4 x 8 x 8 blocks), then all weights by gradient
steps on single chunks of both views. With --refine only the decoder is trained further: latents stay what they are,
so that models trained on them stay valid. Prints held-out PSNR per view (all pixels, moving pixels), written beside
the weights as `codec.json`. Training seeds start at 100000, held-out ones at 900000: neither meets the demo's seeds.
"""

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
import tyro
from torch import Tensor

from simforcing.data.windows import resize_crop
from simforcing.model.codec import TinyCodec, TinyCodecConfig
from simforcing.twin.playground import WorldConfig, episode

TRAIN_SEED, HELD_OUT_SEED, CROP = 100_000, 900_000, 32


@dataclass
class Args:
    """Where to, how long, on how much."""

    out: Path
    minutes: float = 20.0
    episodes: int = 400
    held_out: int = 24
    size: int = 64
    channels: int = 40
    batch: int = 40
    lr: float = 1.5e-3
    noise: float = 0.06  # of the latents' spread: the decoder will read predicted latents
    workers: int = 2
    threads: int = 1
    seed: int = 0
    refine: bool = False  # train the decoder of the codec at `out` further, leave its encoder
    frames: Path = Path("runs/codec-frames.npz")  # rendered once


def views(seed: int, size: int) -> np.ndarray:
    """Both views of one episode, uint8 [2, N, H, W, 3]; the motion is augmented in every second episode."""
    rollout = episode(seed, WorldConfig(), augment=seed % 2 == 1)
    assert rollout.real is not None
    return np.stack([resize_crop(v, size, size) for v in (rollout.real, rollout.sim)])


def collect(first: int, n: int, args: Args) -> Tensor:
    """uint8 [n, 2, N, H, W, 3]."""
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        return torch.from_numpy(
            np.stack(list(pool.map(partial(views, size=args.size), range(first, first + n), chunksize=4)))
        )


def fit_linear(codec: TinyCodec, videos: Tensor, rng: torch.Generator) -> None:
    """Principal components of blocks."""
    blocks = []
    for _ in range(200):
        blocks.append(codec.blocks(draw_chunks(videos, 32, rng)[1]).flatten(0, 2))
    x = torch.cat(blocks).double()
    mean = x.mean(0)
    values, vectors = torch.linalg.eigh((x - mean).T @ (x - mean) / len(x))
    basis = vectors.flip(1)[:, : codec.channels].T
    kept = float(values.flip(0)[: codec.channels].sum() / values.sum())
    print(f"linear projection: {codec.channels} components keep {kept:.4f} of the variance", flush=True)
    codec.mean.data.copy_(mean.float())
    codec.basis.data.copy_(basis.float())


def draw_chunks(videos: Tensor, n: int, rng: torch.Generator, size: int = CROP) -> tuple[Tensor, Tensor]:
    """n chunks of 4 frames and the chunks before them, as crops [n, 12, size, size] in [-1, 1]; a fifth are stills.

    Of four random places the one where most happens (motion, colour) is taken three times in four.
    """
    episodes, _, length, height, width = videos.shape[:5]
    i = torch.randint(episodes, (n,), generator=rng)
    view = torch.randint(2, (n,), generator=rng)
    start = torch.randint(0, length - 8, (n,), generator=rng)
    kind = torch.rand(n, generator=rng)
    rows = torch.randint((height - size) // 8 + 1, (n, 4), generator=rng) * 8
    columns = torch.randint((width - size) // 8 + 1, (n, 4), generator=rng) * 8
    best = torch.rand(n, generator=rng) < 0.75
    chunks, before = [], []
    for k in range(n):
        clip = videos[i[k], view[k], start[k] : start[k] + 8].float() / 127.5 - 1  # 8 H W 3
        happens = (clip[7] - clip[4]).abs().amax(-1) + 0.5 * (clip[4].amax(-1) - clip[4].amin(-1))
        places = [(int(r), int(c)) for r, c in zip(rows[k], columns[k], strict=True)]
        busy = [float(happens[r : r + size, c : c + size].mean()) for r, c in places]
        r, c = places[int(np.argmax(busy)) if best[k] else 0]
        crop = clip[:, r : r + size, c : c + size].permute(3, 0, 1, 2)  # 3 8 h w
        if kind[k] < 0.2:
            crop = crop[:, 7:].expand(-1, 8, -1, -1)
        elif kind[k] < 0.4:  # the chunk before is a still first frame
            crop = torch.cat([crop[:, 3:4].expand(-1, 4, -1, -1), crop[:, 4:]], dim=1)
        before.append(crop[:, :4].flatten(0, 1))
        chunks.append(crop[:, 4:].flatten(0, 1))
    return torch.stack(before), torch.stack(chunks)


def loss_of(
    codec: TinyCodec, before: Tensor, chunk: Tensor, noise: float, rng: torch.Generator, frozen: bool
) -> Tensor:
    """Smoothed absolute error, more where the picture moves or has detail, and of its gradients."""
    with torch.set_grad_enabled(not frozen):
        z, past = codec.encode_chunks(chunk), codec.encode_chunks(before)
    spread = noise * z.detach().std()
    z, past = (x + spread * torch.randn(x.shape, generator=rng) for x in (z, past))
    error = codec.decode_chunks(past, z) - chunk
    frames = chunk.unflatten(1, (3, 4))
    moving = (frames - before.unflatten(1, (3, 4))[:, :, -1:]).abs().amax(1, keepdim=True) > 0.1
    blurred = functional.avg_pool2d(chunk, 9, stride=1, padding=4, count_include_pad=False)
    detail = (chunk - blurred).unflatten(1, (3, 4)).abs().amax(1, keepdim=True) > 0.12  # edges and small things
    weight = 1 + 3 * moving.float() + 2 * detail.float()
    smooth = (error.square() + 1e-4).sqrt().unflatten(1, (3, 4))
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    return (weight * smooth).mean() / weight.mean() + 0.5 * edges + 1e-3 * z.square().mean()


@torch.no_grad()
def held_out(codec: TinyCodec, videos: Tensor) -> dict[str, float]:
    """PSNR in dB over predicted frames of 13-frame clips: all pixels and moving ones, per view."""
    result = {}
    for v, name in enumerate(("real", "sim")):
        clips = videos[:, v, 4:17].float() / 127.5 - 1
        x = clips.permute(0, 4, 1, 2, 3)
        y = codec.decode(codec.encode(x)).clamp(-1, 1)
        square = (x - y)[:, :, 1:].square().mean(1)
        moving = (x[:, :, 1:] - x[:, :, :1]).abs().amax(1) > 0.1
        result[name] = -10 * math.log10(float(square.mean()) / 4)
        result[f"{name}_moving"] = -10 * math.log10(float(square[moving].mean()) / 4)
    return {k: round(v, 2) for k, v in result.items()}


@torch.no_grad()
def normalise(codec: TinyCodec, videos: Tensor, rng: torch.Generator) -> None:
    """Zero mean a channel and unit spread over all of them together, averaged over both views."""
    codec.shift.zero_()
    codec.scale.fill_(1.0)
    z = torch.cat([codec.encode_chunks(draw_chunks(videos, 32, rng)[1]) for _ in range(40)])
    codec.shift.copy_(z.mean((0, 2, 3)))
    codec.scale.copy_((z - codec.shift[:, None, None]).square().mean().sqrt())


def steps(args: Args, began: float) -> Iterator[float]:
    """Shares of the time that have passed."""
    while (passed := (time.perf_counter() - began) / (60 * args.minutes)) < 1:
        yield passed


def frames(args: Args) -> tuple[Tensor, Tensor]:
    """Training and held-out videos; rendered once."""
    if not args.frames.exists():
        args.frames.parent.mkdir(parents=True, exist_ok=True)
        test, train = collect(HELD_OUT_SEED, args.held_out, args), collect(TRAIN_SEED, args.episodes, args)
        partial_file = args.frames.with_suffix(".partial.npz")
        np.savez(partial_file, train=train.numpy(), test=test.numpy())
        partial_file.rename(args.frames)
    with np.load(args.frames) as stored:
        return torch.from_numpy(stored["train"]), torch.from_numpy(stored["test"])


def fit(codec: TinyCodec, videos: Tensor, test: Tensor, args: Args, rng: torch.Generator) -> int:
    """Gradient steps for the given time; returns their number."""
    trained = codec.decoder.parameters() if args.refine else codec.parameters()
    parameters = [p.requires_grad_(True) for p in trained]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.98), weight_decay=1e-4, fused=True)
    done, shown, began = 0, 0.0, time.perf_counter()
    for passed in steps(args, began):
        rate = min(passed / 0.02, 1.0) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * passed)))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        # Whole pictures for the decoder alone: its norms see what they will see in use.
        size, n = (args.size, args.batch // 3) if args.refine else (CROP, args.batch)
        loss = loss_of(codec, *draw_chunks(videos, n, rng, size), args.noise, rng, args.refine)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if passed - shown > 0.05:
            shown = passed
            print(f"{passed:.2f} step {done} loss {float(loss.detach()):.4f} {held_out(codec, test)}", flush=True)
    return done


def main(args: Args) -> None:
    """Fits and writes."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = torch.Generator().manual_seed(args.seed + args.refine)
    videos, test = frames(args)
    card: dict[str, object] = {}
    if args.refine:
        codec = TinyCodec.load(args.out)
        card = json.loads(args.out.with_suffix(".json").read_text())
    else:
        codec = TinyCodec(TinyCodecConfig(channels=args.channels))
        fit_linear(codec, videos, rng)
        normalise(codec, videos, rng)
        card["linear"] = held_out(codec, test)
        print("linear", card["linear"], flush=True)
    codec.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    done = fit(codec, videos, test, args, rng)
    if not args.refine:
        normalise(codec, videos, rng)
    codec.save(args.out)
    codec = TinyCodec.load(args.out)
    arguments = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(args).items() if k not in ("out", "frames")}
    card["refined" if args.refine else "fitted"] = {
        "held_out": held_out(codec, test),
        "steps": done,
        "arguments": arguments,
    }
    args.out.with_suffix(".json").write_text(json.dumps(card, indent=2) + "\n")
    print(json.dumps(card, indent=2))


if __name__ == "__main__":
    main(tyro.cli(Args))
