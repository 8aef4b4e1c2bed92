"""Times one training step (losses and gradients, without the optimiser), ours against the plain one, in turn.

    python benchmarks/train_step.py            one thread, float32, under 50 s
    python benchmarks/train_step.py --json     the same rows as JSON
    python benchmarks/train_step.py --full     also bfloat16 and all threads

`student` is the whole step: frozen teacher, simulated and real branch, flow matching and motion distillation, in the
released setting (one prompt for both branches). Retention 0.7 leaves one of the clips without simulation.
"""

import argparse
import sys
import time

import torch
from common import (
    ACTIONS,
    CHANNELS,
    DTYPES,
    FRAMES,
    HEIGHT,
    TEXT,
    TEXT_DIM,
    WIDTH,
    Row,
    all_threads,
    bench_model,
    median,
    seconds,
    show,
)
from plain import Plain, student_step

from simforcing.model.world_model import WorldModel
from simforcing.train.objective import Batch, Draws, ObjectiveConfig, student_loss

BATCH = 2
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # relative, of the loss and of the norm of all gradients


def inputs(dtype: torch.dtype) -> tuple[Batch, Draws]:
    g = torch.Generator().manual_seed(1)
    shape = (BATCH, CHANNELS, FRAMES, HEIGHT, WIDTH)
    latents, sim, noise, corruption = (torch.randn(shape, generator=g).to(dtype) for _ in range(4))
    mask = torch.ones(BATCH, TEXT, dtype=torch.bool)
    text = torch.randn(BATCH, TEXT, TEXT_DIM, generator=g).to(dtype)
    action, proprio = torch.randn(BATCH, ACTIONS, 7, generator=g), torch.randn(BATCH, 7, generator=g)
    gate, keep, spread = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.7]), torch.tensor([0.0, 0.06])
    timestep = torch.tensor([400.0, 730.0])
    draws = Draws(noise, timestep, gate, keep.to(dtype), spread.to(dtype), corruption)
    return Batch(latents, action.to(dtype), proprio.to(dtype), text, mask, sim), draws


def gradient_norm(model: WorldModel) -> float:
    return float(sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None)) ** 0.5


def compared(dtype: str, deadline: float, rounds: int) -> tuple[Row, float]:
    """Median times of both, and their greatest relative difference."""
    student = bench_model(0).to(DTYPES[dtype])
    teacher = bench_model(1, sim_condition=False).to(DTYPES[dtype]).requires_grad_(False)
    teacher.proprio.load_state_dict(student.proprio.state_dict())  # the released teacher borrows the student's
    batch, draws = inputs(DTYPES[dtype])
    config = ObjectiveConfig.released()
    plain = (Plain(student), Plain(teacher))

    def ours_step() -> float:
        terms = student_loss(student, teacher, batch, draws, config)
        terms["total"].backward()
        return float(terms["total"].detach())

    def measured(step: object) -> tuple[float, float, float]:
        student.zero_grad(set_to_none=True)
        total = []
        spent = seconds(lambda: total.append(step()))  # type: ignore[operator]
        return spent, total[0], gradient_norm(student)

    times: dict[str, list[float]] = {"ours": [], "plain": []}
    worst, last = 0.0, 0.0
    for i in range(rounds):
        began = time.perf_counter()
        if i and began + last > deadline:
            break
        mine = measured(ours_step)
        theirs = measured(lambda: float(student_step(*plain, batch, draws, config)["total"].detach()))
        times["ours"].append(mine[0])
        times["plain"].append(theirs[0])
        worst = max(worst, *(abs(a / b - 1) for a, b in zip(mine[1:], theirs[1:], strict=True)))
        last = time.perf_counter() - began
    # The first round also pays for memory that later ones reuse.
    tail = {k: v[1:] if len(v) > 2 else v for k, v in times.items()}
    return Row("student", dtype, torch.get_num_threads(), BATCH, median(tail["plain"]), median(tail["ours"])), worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="rows as JSON on standard output")
    parser.add_argument("--full", action="store_true", help="all dtypes and thread counts")
    options = parser.parse_args()
    deadline = float("inf") if options.full else time.perf_counter() + 38
    settings = [("float32", 1)]
    if options.full:
        settings = [(d, n) for d in DTYPES for n in dict.fromkeys((1, all_threads()))]
    rows, notes = [], []
    for dtype, threads in settings:
        torch.set_num_threads(threads)
        row, worst = compared(dtype, deadline, 6)
        if worst > TOLERANCE[dtype]:
            sys.exit(f"ours and plain differ by {worst:.2g} (relative) in {dtype}: not the same, nothing to compare")
        rows.append(row)
        notes.append(f"{dtype}, {threads} thread(s): loss and gradient norm differ by {worst:.1e} at most (relative)")
    show(rows, notes, options.json)


if __name__ == "__main__":
    main()
