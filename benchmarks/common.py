"""What the benchmarks share: sizes in the paper's proportions, random weights and inputs, timing and the table."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from simforcing.model.experts import ExpertConfig
from simforcing.model.world_model import WorldModel, WorldModelConfig
from simforcing.predict.sampler import Inputs

FRAMES, HEIGHT, WIDTH, CHANNELS = 6, 14, 20, 48  # latents of 21 frames of 224 x 320: 420 tokens, 70 a frame
ACTIONS, TEXT, TEXT_DIM = 20, 128, 4096  # with proprioception: 129 context tokens of UMT5's width
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def bench_model(seed: int = 0, sim_condition: bool = True) -> WorldModel:
    """Width 512, 8 blocks, heads of 128; the rest in the proportions of the paper's 5 B model. Random weights."""
    torch.manual_seed(seed)
    shared = {"num_layers": 8, "num_heads": 4, "head_dim": 128, "text_dim": TEXT_DIM, "freq_dim": 256}
    video = ExpertConfig(dim=512, ffn_dim=2384, **shared)
    action = ExpertConfig(dim=176, ffn_dim=688, **shared)
    model = WorldModel(WorldModelConfig(video, action, CHANNELS, sim_condition=sim_condition))
    if model.sim is not None:
        for conv in model.sim.layers:
            torch.nn.init.normal_(conv.weight, std=0.05)
    return model.eval()


@dataclass(frozen=True)
class Start:
    """Random inputs of a rollout of B clips."""

    first_real: Tensor
    first_sim: Tensor
    noise: Tensor
    action: Tensor
    proprio: Tensor
    text: Tensor
    text_mask: Tensor

    @classmethod
    def random(cls, batch: int, dtype: torch.dtype, seed: int = 1) -> "Start":
        g = torch.Generator().manual_seed(seed)

        def some(*shape: int) -> Tensor:
            return torch.randn(batch, *shape, generator=g).to(dtype)

        first = (CHANNELS, 1, HEIGHT, WIDTH)
        noise = some(CHANNELS, FRAMES, HEIGHT, WIDTH)
        mask = torch.ones(batch, TEXT, dtype=torch.bool)
        return cls(some(*first), some(*first), noise, some(ACTIONS, 7), some(7), some(TEXT, TEXT_DIM), mask)

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.action, self.proprio, self.text, self.text_mask)


@dataclass
class Row:
    """One line of a result; seconds are medians, `ratio` is plain_s / ours_s."""

    setting: list[float] | str
    dtype: str
    threads: int
    batch: int
    plain_s: float
    ours_s: float

    @property
    def ratio(self) -> float:
        return self.plain_s / self.ours_s


def seconds(f: Callable[[], object]) -> float:
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


def all_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def show(rows: Sequence[Row], notes: Sequence[str], as_json: bool) -> None:
    """The rows as a table, or as JSON on standard output."""
    if as_json:
        print(json.dumps([asdict(r) | {"ratio": r.ratio} for r in rows], indent=1))
        return
    print(f"torch {torch.__version__}, {platform.machine()}, {all_threads()} logical CPUs")
    print(f"{'setting':<16}{'dtype':<10}{'threads':>8}{'batch':>6}{'plain s':>10}{'ours s':>9}{'ratio':>7}")
    for r in rows:
        setting = r.setting if isinstance(r.setting, str) else ", ".join(f"{x:g}" for x in r.setting)
        print(f"{setting:<16}{r.dtype:<10}{r.threads:>8}{r.batch:>6}{r.plain_s:>10.3f}{r.ours_s:>9.3f}{r.ratio:>7.2f}")
    for note in notes:
        print(note)
