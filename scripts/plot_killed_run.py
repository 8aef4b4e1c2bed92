"""Trains a student twice, once killed by `kill -9` at two moments and resumed, and draws both losses over each other.

    python scripts/plot_killed_run.py --data runs/demo/latents --out docs/images/killed-run.png

A checkpoint is due every few seconds, so that each kill loses a few steps, which are done again and must be the same.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def command(data: Path, out: Path, steps: int) -> list[str]:
    """One training of the demo's student, a checkpoint every four seconds."""
    settings = ["training.checkpoint_seconds=4", "training.log_every=2", "training.validate_seconds=1e6"]
    return [
        *(sys.executable, "-m", "simforcing.cli.main", "train", "student", "--recipe", "demo", "--teacher", "bundled"),
        *("--data", str(data), "--out", str(out), "--steps", str(steps), "--threads", "1", "--set", *settings),
    ]


def losses(out: Path) -> dict[int, float]:
    """Loss of each logged step; what was done again after a kill replaces what was lost."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["total"] for line in lines if "total" in line}


def killed(data: Path, out: Path, steps: int, moments: tuple[float, ...]) -> list[int]:
    """Trains, killing the run once it has passed each share of its steps; the last steps before the kills."""
    ends = []
    for share in moments:
        process = subprocess.Popen(command(data, out, steps), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (out / "log.jsonl").exists() or max(losses(out), default=0) < share * steps:
            if process.poll() is not None:
                raise SystemExit(f"the run ended by itself with exit code {process.returncode}")
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        ends.append(max(losses(out)))
    subprocess.run(command(data, out, steps), check=True)
    return ends


def main() -> None:
    """Run both, compare, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs/demo/latents"), help="cache that the demo made")
    parser.add_argument("--out", type=Path, default=Path("docs/images/killed-run.png"))
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole, broken = Path(folder) / "whole", Path(folder) / "broken"
        subprocess.run(command(options.data, whole, options.steps), check=True)
        ends = killed(options.data, broken, options.steps, (0.3, 0.65))
        one, two = losses(whole), losses(broken)
    common = sorted(set(one) & set(two))
    worst = max(abs(one[step] - two[step]) for step in common)
    print(f"{len(common)} logged steps in both, losses differ by {worst:g} at most; killed after steps {ends}")
    figure, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    axes.plot(list(one), list(one.values()), color="0.7", linewidth=4, label="in one go")
    axes.plot(list(two), list(two.values()), ".", color="C0", markersize=4, label="killed twice and resumed")
    for end in ends:
        axes.axvline(end, color="C3", linestyle=":", label="kill -9" if end == ends[0] else None)
    axes.set(xlabel="step", ylabel="loss", title=f"student, demo recipe; largest difference {worst:g}")
    axes.legend(frameon=False)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=120)


if __name__ == "__main__":
    main()
