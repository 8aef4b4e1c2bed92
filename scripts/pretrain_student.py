"""Trains the student that ships with the package, longer than the demo can: the same commands on more pairs.

    python scripts/pretrain_student.py --out runs/shipped-student --minutes 20

Pairs of the bundled world with seeds from 300000 on (the demo uses others), under the bundled teacher. Resumes.
`scripts/ship.py` copies the result into the package.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from simforcing.cli.encode import Encode
from simforcing.cli.train import Train
from simforcing.twin.playground import write_pairs

SEED = 300_000


@dataclass
class Args:
    """Where to, how long, on how much."""

    out: Path
    minutes: float = 20.0
    episodes: int = 500
    workers: int = 2
    threads: int = 1
    batch_size: int = 16
    lr: float = 1.2e-3
    data_only: bool = False


def main(args: Args) -> None:
    """Runs what is missing."""
    pairs, latents = args.out / "pairs", args.out / "latents"
    args.out.mkdir(parents=True, exist_ok=True)
    if not pairs.exists():
        write_pairs(pairs, range(SEED, SEED + args.episodes), workers=args.workers)
    if not (latents / "split.json").exists():
        Encode(pairs, latents, recipe="demo", every=4, val=12).run()
    if not args.data_only:
        Train(
            "student",
            data=latents,
            out=args.out / "student",
            teacher="bundled",
            seconds=60 * args.minutes,
            batch_size=args.batch_size,
            lr=args.lr,
            threads=args.threads,
        ).run()


if __name__ == "__main__":
    main(tyro.cli(Args))
