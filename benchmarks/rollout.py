"""Times a rollout, ours against the plain one of the released code, in turn.

    python benchmarks/rollout.py            one thread, float32, under 50 s
    python benchmarks/rollout.py --json     the same rows as JSON
    python benchmarks/rollout.py --full     also bfloat16, all threads, more rounds (a quarter of an hour)

A row's setting is [Ns, Nr, w]. The plain code does the same work for w = 0 as for any other w < 1 (both branches), so
these rows share its time; its w = 1 needs the forwards of the simulation stage and of the conditioned branch alone,
whose share of the same run is measured. With a batch of B, plain is B clips one after the other, at the mean time of
its forwards.
"""

import argparse
import sys
import time
from collections import defaultdict

import torch
from common import DTYPES, Row, Start, all_threads, bench_model, median, seconds, show
from plain import Plain, Spent, rollout

from simforcing.model.world_model import WorldModel
from simforcing.predict.sampler import Guidance, two_stages

STEPS = (1, 10)
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # of the latents after 11 steps; bfloat16 keeps 8 bits


def ours(model: WorldModel, start: Start, steps: tuple[int, int], w: float) -> torch.Tensor:
    inputs = start.inputs
    made = two_stages(model, start.first_real, start.first_sim, inputs, inputs, start.noise, *steps, Guidance(w))
    return made.real


def single(model: WorldModel, dtype: str, rounds: int) -> tuple[list[Row], float, float]:
    """Rows of single clips, the greatest difference between both results, seconds of a plain forward."""
    start = Start.random(1, DTYPES[dtype])
    plain, stages = Plain(model), tuple(model.flow.steps(n) for n in STEPS)
    plain_s, ours_s, forward_s = defaultdict(list), defaultdict(list), []
    worst = 0.0
    for _ in range(rounds):
        spent = Spent()
        reference = rollout(plain, start, stages, 0.6, spent)
        forward_s.append((spent.sim + spent.on + spent.off) / forwards(STEPS))
        for w in (0.6, 0.0, 1.0):
            began = time.perf_counter()
            result = ours(model, start, STEPS, w)
            ours_s[w].append(time.perf_counter() - began)
            plain_s[w].append(spent.sim + spent.on + (0 if w == 1 else spent.off))
            if w == 0.6:
                worst = max(worst, float((result - reference).abs().max()))
    threads = torch.get_num_threads()
    rows = [Row([*STEPS, w], dtype, threads, 1, median(plain_s[w]), median(ours_s[w])) for w in ours_s]
    return rows, worst, median(forward_s)


def forwards(steps: tuple[int, int]) -> int:
    """How many the plain code runs for one clip: one a simulation step, two a real step."""
    return steps[0] + 2 * steps[1]


def batched(model: WorldModel, dtype: str, steps: tuple[int, int], rounds: int, forward_s: float) -> list[Row]:
    """A batch of four against single clips."""
    times = defaultdict(list)
    for _ in range(rounds):
        for batch in (1, 4):
            start = Start.random(batch, DTYPES[dtype])
            times[batch].append(seconds(lambda s=start: ours(model, s, steps, 0.6)))
    threads, plain_s = torch.get_num_threads(), forwards(steps) * forward_s
    return [Row([*steps, 0.6], dtype, threads, b, b * plain_s, median(times[b])) for b in (1, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="rows as JSON on standard output")
    parser.add_argument("--full", action="store_true", help="all dtypes and thread counts, five rounds")
    options = parser.parse_args()
    rows: list[Row] = []
    notes = []
    settings = [("float32", 1)]
    if options.full:
        settings = [(d, n) for d in DTYPES for n in dict.fromkeys((1, all_threads()))]
    for dtype, threads in settings:
        torch.set_num_threads(threads)
        model = bench_model().to(DTYPES[dtype]).requires_grad_(False)
        found, worst, forward_s = single(model, dtype, 5 if options.full else 1)
        if worst > TOLERANCE[dtype]:
            sys.exit(f"ours and plain differ by {worst:.2g} in {dtype}: not the same model, nothing to compare")
        steps, rounds = (STEPS, 3) if options.full else ((1, 1), 1)
        rows += [*found, *batched(model, dtype, steps, rounds, forward_s)]
        notes.append(f"{dtype}, {threads} thread(s): results differ by {worst:.1e} at most")
    show(rows, notes, options.json)


if __name__ == "__main__":
    main()
