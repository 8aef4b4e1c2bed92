"""The demo in small: every stage, resumed after a kill, quick the second time, refused for another configuration."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SMALL = ("--seconds", "4", "--train-episodes", "6", "--val-episodes", "2", "--test-episodes", "3", "--workers", "1")


def demo(out: Path, *more: str) -> subprocess.Popen[str]:
    """The demo as a user starts it."""
    command = [sys.executable, "-m", "simforcing.cli.main", "demo", "--out", str(out), *SMALL, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    out, err = process.communicate(timeout=280)
    return process.returncode, out, err


PARENT = """
import subprocess, time
from simforcing.cli.demo import ends_with_us
child = subprocess.Popen(["sleep", "100"], preexec_fn=ends_with_us())
print(child.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asked of the Linux kernel")
def test_trainings_end_when_the_demo_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = Path("/proc", parent.stdout.readline().strip(), "stat")
    assert _state(child) not in ("", "Z")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 30
    while _state(child) not in ("", "Z") and time.monotonic() < until:
        time.sleep(0.05)
    assert _state(child) in ("", "Z")


def _state(process: Path) -> str:
    """The state letter of a process, Z where it has ended and nobody asked for its exit code; empty if gone."""
    try:
        return process.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_demo_killed_resumed_and_called_again(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    first = demo(out)
    while not (out / "student" / "log.jsonl").exists() and first.poll() is None:
        time.sleep(0.2)
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    kept = {p: p.stat().st_mtime_ns for p in (out / "pairs").rglob("*") if p.is_file()}

    code, shown, errors = finish(demo(out))
    assert code == 0, errors
    assert {p: p.stat().st_mtime_ns for p in (out / "pairs").rglob("*") if p.is_file()} == kept
    page = (out / "report" / "index.html").read_text()
    assert str(out / "report" / "index.html") in shown
    assert "rendered stand-in" in page
    assert not re.search(r"(src|href)=[\"']?https?:", page)

    numbers = json.loads((out / "metrics.json").read_text())
    rows = {row["name"]: row for row in numbers["rows"]}
    for name in ("copy of the first frame", "codec ceiling", "real only, from scratch", "real only, from the teacher"):
        assert rows[name]["w"] is None
        assert rows[name]["psnr"]["low"] <= rows[name]["psnr"]["mean"] <= rows[name]["psnr"]["high"]
    assert {row["w"] for row in numbers["rows"]} >= {None, 0.0, 0.3, 0.6, 1.0}
    assert rows["codec ceiling"]["psnr"]["mean"] > rows["copy of the first frame"]["psnr"]["mean"]
    assert {"teacher", "student"} <= set(numbers["action_ratio"])
    assert numbers["action_ratio"]["teacher"] > 1.2
    assert all({"name", "a", "b", "metric", "mean", "low", "high"} <= set(d) for d in numbers["differences"])
    assert numbers["protocol"]["clips"] == 6
    assert set(numbers["training"]) == {"scratch", "finetuned", "student"}

    began = time.perf_counter()
    code, shown, errors = finish(demo(out))
    assert code == 0, errors
    assert time.perf_counter() - began < 60
    assert json.loads((out / "metrics.json").read_text()) == numbers

    code, _, errors = finish(demo(out, "--seed", "3"))
    assert code == 2
    assert "seed: 0 there, 3 now" in errors
    assert json.loads((out / "metrics.json").read_text()) == numbers
