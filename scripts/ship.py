"""Copies a trained model into the package, in half precision, with a card that says how it was trained.

python scripts/ship.py runs/teacher teacher
python scripts/ship.py runs/shipped-student/student student
python scripts/ship.py runs/study/runs/full-0 student --made-by "simforcing study"
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from simforcing.evaluate.protocol import code_version, describe_machine
from simforcing.model.world_model import WorldModel
from simforcing.train.checkpoint import write_text

ASSETS = Path(__file__).resolve().parent.parent / "src" / "simforcing" / "assets"


@dataclass
class Args:
    """Which run, as what."""

    run: Annotated[Path, tyro.conf.Positional]
    name: Annotated[Literal["teacher", "student"], tyro.conf.Positional]
    made_by: str | None = None  # for the card; default the script that pre-trains such a model


def main(args: Args) -> None:
    """Writes weights, `log.jsonl` (validation rows) and `card.json`."""
    rows = [json.loads(line) for line in (args.run / "log.jsonl").read_text().splitlines()]
    last = rows[-1]
    card = {
        "role": args.name,
        "run": json.loads((args.run / "run.json").read_text()),
        "steps": last["step"],
        "seconds": last["seconds"],
        "held_out": {k: v for k, v in last.items() if k.startswith("val_")},
        "machine": describe_machine(),
        "code": code_version(),
        "made_by": args.made_by or f"scripts/pretrain_{args.name}.py",
        "data": "simulated and 'real' views of the bundled world; no robot was involved",
    }
    target = ASSETS / args.name
    model = WorldModel.from_pretrained(args.run / "model")
    shutil.rmtree(target, ignore_errors=True)
    model.save_pretrained(target, half=True)
    write_text(target / "card.json", json.dumps(card, indent=1) + "\n")
    kept = [json.dumps(row) for row in rows if any(k.startswith("val_") for k in row)]
    write_text(target / "log.jsonl", "\n".join(kept) + "\n")
    for file in target.iterdir():
        file.chmod(0o644)
    print(f"{target}: {sum(f.stat().st_size for f in target.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main(tyro.cli(Args))
