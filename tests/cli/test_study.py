"""`simforcing study`: the plan, and all of it in small, killed and taken up again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from simforcing.cli.main import main
from simforcing.evaluate.campaign.plan import Sizes, units
from simforcing.evaluate.campaign.queue import LOG, missing, spent


def study(out: Path, *more: str) -> subprocess.Popen[str]:
    """As a user starts it."""
    command = [sys.executable, "-m", "simforcing.cli.main", "study", "--small", "--out", str(out), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_the_plan_is_said_and_nothing_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    assert main(["study", "--plan", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    count = len(units(Sizes()))
    assert f"{count} units, {count} to do with 2 workers" in shown
    assert "runs/full-0/model" in shown and "  Training: " in shown
    assert not out.exists()


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "--workers", "0", "--out", str(tmp_path)]) == 2
    assert "give at least 1" in capsys.readouterr().err
    (tmp_path / "mine.txt").write_text("")
    assert main(["study", "--out", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_study_killed_goes_on_and_ends(tmp_path: Path) -> None:
    out, everything = tmp_path / "study", units(Sizes.small())
    first = study(out)
    until = time.monotonic() + 400
    while not list(out.glob("runs/*/model")) and first.poll() is None and time.monotonic() < until:
        time.sleep(0.2)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    kept = {row["unit"] for row in spent(out)}
    assert kept and len(missing(out, everything)) > 0
    before = {unit: (out / unit).stat().st_mtime_ns for unit in kept}

    second = study(out)
    shown, errors = second.communicate(timeout=800)
    assert second.returncode == 0, errors
    assert missing(out, everything) == []
    assert {unit: (out / unit).stat().st_mtime_ns for unit in kept} == before
    done = [row["unit"] for row in spent(out)]
    assert len(done) == len(set(done)) and len(done) >= len(everything) - 1  # a kill may fall between file and log

    page, stored = (out / "results.md").read_text(), json.loads((out / "results.json").read_text())
    assert str(out / "results.md") in shown
    assert "units are missing" not in page and stored["units_left"] == 0
    outcomes = [claim["outcome"] for group in stored["claims"].values() for claim in group]
    # other data, a policy, and a distance of sets, which needs 16 clips; what was trained once decides nothing
    assert outcomes.count("not measured") == 3
    assert outcomes.count("not decided") == len(outcomes) - 4
    assert stored["rows"]["full@exchanged"]["psnr"] != stored["rows"]["full@w0.6"]["psnr"]
    card = out / "runs" / "full-0"
    assert (card / "run.json").exists() and (card / "log.jsonl").exists() and not (card / "checkpoints").exists()

    files = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file() and "results.m" not in p.name}
    again = study(out)
    assert again.wait(timeout=120) == 0
    changed = {p.name for p, at in files.items() if p.exists() and p.stat().st_mtime_ns != at}
    assert changed <= {"results.json", "sweep.json"} and LOG not in changed
