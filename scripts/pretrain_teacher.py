"""Pre-trains the teacher that ships with the package: simulated rollouts with augmented trajectories, nothing else.

    python scripts/pretrain_teacher.py --out runs/teacher --minutes 70

Three stages, each restartable: render episodes (simulation view only), encode them with the bundled codec, train. It
logs losses and the *action ratio* on held-out episodes (error with actions exchanged between clips over error with
the true ones: near 1 means that the model ignores its actions). Copy `model/` of the run into the package to ship it.
Training seeds start at 200000, held-out ones at 950000; the demo uses others.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import tyro
from rich.console import Console

from simforcing.data.cache import read_cache, read_header, write_cache
from simforcing.data.episode import ActionConvention
from simforcing.data.windows import ClipRule, resize_crop, starts
from simforcing.model.codec import TinyCodec, load_codec, to_unit
from simforcing.recipes import recipe
from simforcing.train.batches import from_cache
from simforcing.train.checkpoint import claim_run
from simforcing.train.loop import Run, train
from simforcing.train.roles import flow_loss, new_model, new_preparation
from simforcing.train.validate import validation
from simforcing.twin.playground import WorldConfig, episode

TRAIN_SEED, HELD_OUT_SEED, SHARD = 200_000, 950_000, 100


@dataclass
class Args:
    """Where to, how long, on how much."""

    out: Path
    minutes: float = 70.0
    episodes: int = 3000
    held_out: int = 100
    workers: int = 2
    threads: int = 1
    every: int = 4  # rows between the starts of windows
    render_only: bool = False


def simulated(seed: int, rule: ClipRule) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Frames at clip size, actions, states and task of one simulated episode; nine in ten are augmented."""
    r = episode(seed, WorldConfig(), real=False, augment=seed % 10 != 0)
    return resize_crop(r.sim, rule.height, rule.width), r.targets, r.state, r.task


def render(args: Args, rule: ClipRule) -> list[Path]:
    """Shards of 100 episodes; those that exist are kept."""
    folder = args.out.parent / f"{args.out.name}-frames"
    folder.mkdir(parents=True, exist_ok=True)
    seeds = [(TRAIN_SEED, args.episodes), (HELD_OUT_SEED, args.held_out)]
    firsts = [first + i for first, n in seeds for i in range(0, n, SHARD)]
    paths = [folder / f"{first}.npz" for first in firsts]
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        for first, path in zip(firsts, paths, strict=True):
            if path.exists():
                continue
            done = list(pool.map(partial(simulated, rule=rule), range(first, first + SHARD), chunksize=5))
            partial_path = path.with_suffix(".partial.npz")
            names = ("frames", "action", "state", "task")
            np.savez(partial_path, **{n: np.stack([row[i] for row in done]) for i, n in enumerate(names)})
            os.replace(partial_path, path)
            Console().print(f"rendered {path.name}")
    return paths


def encode(paths: list[Path], codec: TinyCodec, rule: ClipRule, every: int) -> dict[str, np.ndarray]:
    """Latents of every `every`-th window; each chunk of frames is encoded once, whatever windows it belongs to."""
    parts: dict[str, list[np.ndarray]] = {}
    for number, path in enumerate(paths):
        with np.load(path) as shard:
            frames, action, state, task = (shard[k] for k in ("frames", "action", "state", "task"))
        first = starts(frames.shape[1], rule, every)
        offsets = sorted({s + 1 + 4 * k for s in first for k in range((rule.frames - 1) // 4)})
        for i, video in enumerate(frames):
            pixels = to_unit(torch.from_numpy(video)[None])[0]  # 3 N H W
            stills = torch.stack([pixels[:, [s] * 4] for s in first])
            moving = torch.stack([pixels[:, o : o + 4] for o in offsets])
            with torch.inference_mode():
                z = codec.encode_chunks(torch.cat([stills, moving]).flatten(1, 2)).half().numpy()
            chunk = dict(zip(offsets, z[len(first) :], strict=True))
            row = {
                "sim": np.stack(
                    [
                        np.stack([z[j], *(chunk[s + 1 + 4 * k] for k in range((rule.frames - 1) // 4))], axis=1)
                        for j, s in enumerate(first)
                    ]
                ),
                "action": np.stack([action[i, s : s + rule.actions] for s in first]),
                "proprio": np.stack([state[i, s] for s in first]),
                "episode": np.full(len(first), number * SHARD + i, np.int32),
                "start": np.array(first, np.int32),
                "name": np.array([task[i]] * len(first)),
            }
            for key, value in row.items():
                parts.setdefault(key, []).append(value)
    return {key: np.concatenate(value) for key, value in parts.items()}


def encoded(args: Args, paths: list[Path], codec: TinyCodec, rule: ClipRule) -> dict[str, np.ndarray]:
    """As `encode`, kept in a cache beside the frames."""
    cache = args.out.parent / f"{args.out.name}-latents"
    header = {
        "codec": codec.identity,
        "rule": asdict(rule),
        "every": args.every,
        "shards": [p.stem for p in paths],
    }
    if not cache.exists():
        arrays = encode(paths, codec, rule, args.every)
        tasks = sorted(set(arrays["name"].tolist()))
        arrays["task"] = np.array([tasks.index(n) for n in arrays.pop("name").tolist()], np.int32)
        write_cache(cache, header | {"tasks": tasks}, [arrays])
    return read_cache(cache, header) | {"tasks": np.array(read_header(cache)["tasks"])}


def main(args: Args) -> None:
    """Runs the stages."""
    torch.set_num_threads(args.threads)
    found = recipe("demo")
    paths = render(args, found.rule)
    if args.render_only:
        return
    codec = load_codec(found.codec)
    assert isinstance(codec, TinyCodec)
    arrays = encoded(args, paths, codec, found.rule)
    tasks = arrays.pop("tasks").tolist()
    held_out = arrays["episode"] >= -(-args.episodes // SHARD) * SHARD
    action = asdict(ActionConvention())
    header = {"rule": asdict(found.rule), "codec": codec.identity, "action": action}
    preparation = new_preparation(found, header, arrays["action"][~held_out], arrays["proprio"][~held_out])
    clips = from_cache(arrays, tasks, preparation)
    train_clips, test_clips = (clips.select(torch.from_numpy(rows.nonzero()[0])) for rows in (~held_out, held_out))
    model = new_model(found, preparation, codec.channels, seed=0)
    config = replace(
        found.teacher, seconds=60 * args.minutes, checkpoint_seconds=300, validate_seconds=150, log_every=100
    )
    description = {
        "role": "teacher",
        "data": {"episodes": args.episodes, "world": asdict(WorldConfig())},
        "training": asdict(config),
    }
    claim_run(args.out, description)
    print(
        f"{len(train_clips)} clips to train on, {len(test_clips)} held out, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters",
        flush=True,
    )
    run = Run(
        model,
        train_clips,
        flow_loss(),
        config,
        args.out,
        validation(test_clips),
        lambda passed, row: print(f"{passed:.3f} {row}", flush=True),
    )
    train(run)
    if not (args.out / "model").exists():
        model.save_pretrained(args.out / "model")


if __name__ == "__main__":
    main(tyro.cli(Args))
