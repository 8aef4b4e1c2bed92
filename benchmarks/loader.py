"""Times the loader against the training that it feeds, in turn: clips a second of each, on all cores.

    python benchmarks/loader.py            recipes tiny and small, under 60 s
    python benchmarks/loader.py --json     the same rows as JSON

`loader` reads random batches of pairs from a cache on disk, row by row with their checksums, as training does; `step`
is the student's (frozen teacher, both branches, gradients) without its optimiser, with random weights. Of `small`,
whose step takes a minute here, it is a single forward of one clip; a student's step does the work of seven, so what
it consumes is less than the row says. Fails where the loader delivers less than five times what is consumed.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from common import all_threads, median

from simforcing.data.cache import open_cache, write_cache
from simforcing.data.episode import ActionConvention
from simforcing.model.codec import load_codec
from simforcing.model.preparation import Preparation
from simforcing.model.world_model import WorldModel
from simforcing.recipes import recipe
from simforcing.train.batches import LatentClips, from_cache
from simforcing.train.objective import Batch, draw, student_loss
from simforcing.train.recipe import Recipe
from simforcing.train.roles import new_model, new_preparation, student_of

NEEDED = 5.0
STEP_CLIPS = {"tiny": 8, "small": 1}
CLIPS, SHARD = 384, 128


@dataclass
class Row:
    """Medians; `ratio` is what the loader delivers over what a step consumes."""

    recipe: str
    threads: int
    clip_mb: float
    loader_clips_per_s: float
    step_clips_per_s: float

    @property
    def ratio(self) -> float:
        return self.loader_clips_per_s / self.step_clips_per_s


def clips(root: Path, found: Recipe) -> tuple[LatentClips, Preparation, int]:
    """A cache of random pairs of the recipe's size, opened as training opens it."""
    rule, codec, rng = found.rule, load_codec(found.codec), np.random.default_rng(0)
    shape = codec.latent_shape(rule.frames, rule.height, rule.width)

    def shards() -> object:
        for first in range(0, CLIPS, SHARD):
            yield {
                "action": rng.normal(size=(SHARD, rule.actions, 7)).astype(np.float32),
                "proprio": rng.normal(size=(SHARD, 7)).astype(np.float32),
                "episode": np.arange(first, first + SHARD, dtype=np.int32) // 8,
                "start": np.arange(SHARD, dtype=np.int32) % 8,
                "task": np.zeros(SHARD, np.int32),
                "real": rng.standard_normal((SHARD, *shape), np.float32).astype(np.float16),
                "sim": rng.standard_normal((SHARD, *shape), np.float32).astype(np.float16),
            }

    header = {"codec": codec.identity, "rule": asdict(rule), "action": ActionConvention().to_dict()}
    write_cache(root, header | {"tasks": ["put the block on the plate"]}, shards())  # type: ignore[arg-type]
    cache = open_cache(root, {})
    preparation = new_preparation(found, cache.header, cache["action"], cache["proprio"])
    return from_cache(cache, cache.header["tasks"], preparation), preparation, codec.channels


@torch.no_grad()
def forward(model: WorldModel, batch: Batch) -> None:
    context, mask = model.context(batch.text, batch.text_mask, batch.proprio)
    condition = model.condition(batch.action, context, mask, batch.latents.shape[2:])
    model.denoise(batch.latents, torch.full((len(batch.latents),), 500.0), condition)


def compared(name: str, root: Path, deadline: float) -> Row:
    found = recipe(name, text="hashed-words")
    data, preparation, channels = clips(root / name, found)
    model = student_of(new_model(found, preparation, channels, seed=0)).train()
    teacher = new_model(found, preparation, channels, seed=0).eval().requires_grad_(False)

    def step(batch: Batch, number: int) -> None:
        if name == "small":
            forward(teacher, batch)
            return
        draws = draw(model, batch.latents, found.objective, torch.Generator().manual_seed(number))
        student_loss(model, teacher, batch, draws, found.objective)["total"].backward()
        model.zero_grad(set_to_none=True)

    size, batch_size = STEP_CLIPS[name], found.student.batch_size
    loads, steps, reads = [], [], max(1, 64 // batch_size)
    last = 0.0
    for i in range(12):
        began = time.perf_counter()
        if i > 1 and began + last > deadline:
            break
        for k in range(reads):
            data.batch(batch_size, 0, reads * i + k)
        loads.append((time.perf_counter() - began) / (reads * batch_size))
        batch = data.batch(size, 0, i)
        middle = time.perf_counter()
        step(batch, i)
        steps.append((time.perf_counter() - middle) / size)
        last = time.perf_counter() - began
    # The first round also pays for memory that later ones reuse.
    seconds = [median(v[1:] if len(v) > 1 else v) for v in (loads, steps)]
    megabytes = sum(x[torch.tensor([0])].nbytes for x in (data.real, data.sim) if x is not None) / 1e6
    return Row(name, torch.get_num_threads(), megabytes, 1 / seconds[0], 1 / seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="rows as JSON on standard output")
    options = parser.parse_args()
    torch.set_num_threads(all_threads())
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rows = [compared(name, Path(folder), began + limit) for name, limit in (("tiny", 8), ("small", 25))]
    if options.json:
        print(json.dumps([asdict(r) | {"ratio": r.ratio} for r in rows], indent=1))
    else:
        print(f"torch {torch.__version__}, {all_threads()} logical CPUs")
        print(f"{'recipe':<10}{'threads':>8}{'MB/clip':>9}{'loader clips/s':>16}{'step clips/s':>14}{'ratio':>8}")
        for r in rows:
            print(f"{r.recipe:<10}{r.threads:>8}{r.clip_mb:>9.3f}{r.loader_clips_per_s:>16.1f}"
                  f"{r.step_clips_per_s:>14.2f}{r.ratio:>8.1f}")  # fmt: skip
    slow = [r.recipe for r in rows if r.ratio < NEEDED]
    if slow:
        sys.exit(f"the loader delivers less than {NEEDED:g} times what is consumed: {', '.join(slow)}")


if __name__ == "__main__":
    main()
