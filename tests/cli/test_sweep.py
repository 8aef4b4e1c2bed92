"""`simforcing sweep` on the student that ships: stopped, resumed, called again, refused."""

import importlib.util
import json
from pathlib import Path

import pytest

from simforcing.cli.main import main
from simforcing.evaluate.sweep import Bench, Sweep

MODEL = "bundled-student"


def words(pairs, out: Path, *more: str) -> list[str]:
    given = ["--data", str(pairs.data), "--split", str(pairs.split), "--out", str(out)]
    return [*given, "--no-download", "--latency-repeats", "1", *more]


def test_a_steps_sweep_stopped_resumed_and_called_again(
    held_out_pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "steps"
    grid = ("--sim-steps", "1", "2", "--real-steps", "1", "--w", "0", "1")
    command = ["sweep", "steps", MODEL, *words(held_out_pairs, out, *grid)]
    run, done = Bench.run, []

    def stopping(bench: Bench, cell, where):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(cell)
        return run(bench, cell, where)

    monkeypatch.setattr(Bench, "run", stopping)
    assert main(command) == 130
    kept = {f.name: f.stat().st_mtime_ns for f in (out / "cells").iterdir()}
    assert len(kept) == 2
    done.clear()
    assert main(command) == 0
    assert len(done) == 1  # four cells, of which the two with w = 0 share a measurement
    assert "4 settings, 4 cells, 3 different, 2 there" in capsys.readouterr().out
    assert {f.name: f.stat().st_mtime_ns for f in (out / "cells").iterdir() if f.name in kept} == kept

    found = Sweep.load(out)
    assert len(found.outcomes) == 4
    at = {(o.setting.sim_steps, o.setting.w): o for o in found.outcomes}
    assert at[1, 0.0].metrics == at[2, 0.0].metrics != at[1, 1.0].metrics
    assert "simulation stage" in at[1, 1.0].seconds and "simulation stage" not in at[1, 0.0].seconds
    done.clear()
    assert main(command) == 0 and done == []
    assert main([*command[:-1], "0.6"]) == 2
    assert "another configuration" in capsys.readouterr().err


@pytest.mark.slow
def test_a_guidance_sweep_over_checkpoints_and_seeds(held_out_pairs, tmp_path: Path) -> None:
    out = tmp_path / "guidance"
    grid = ("--w", "0", "1", "--real-steps", "1", "--seeds", "0", "1")
    assert main(["sweep", "guidance", f"0.7={MODEL}", "1=bundled-teacher", *words(held_out_pairs, out, *grid)]) == 0
    stored = json.loads((out / "sweep.json").read_text())
    assert len(stored["cells"]) == 8
    found = Sweep.load(out)
    assert [(o.setting.retention, o.setting.w, o.runs) for o in found.outcomes] == [
        (0.7, 0.0, 2), (0.7, 1.0, 2), (1.0, 0.0, 2), (1.0, 1.0, 2)]  # fmt: skip
    if 1 in stored["blind"]:  # a teacher was never conditioned
        assert found.outcomes[2].metrics == found.outcomes[3].metrics


def test_bad_input(held_out_pairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "guidance", MODEL, *words(held_out_pairs, tmp_path / "x")]) == 2
    assert "give P=MODEL" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed; pip install ray")
def test_ray_spreads_the_cells(held_out_pairs, tmp_path: Path) -> None:
    out = tmp_path / "ray"
    grid = ("--sim-steps", "1", "--real-steps", "1", "--w", "0", "1", "--engine", "ray", "--workers", "1")
    assert main(["sweep", "steps", MODEL, *words(held_out_pairs, out, *grid)]) == 0
    assert len(Sweep.load(out).outcomes) == 2


def test_ray_that_is_missing_is_said(held_out_pairs, tmp_path: Path, monkeypatch, capsys) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    grid = ("--sim-steps", "1", "--real-steps", "1", "--w", "0", "--engine", "ray")
    assert main(["sweep", "steps", MODEL, *words(held_out_pairs, tmp_path / "ray", *grid)]) == 2
    assert "ray is not installed; pip install ray" in capsys.readouterr().err
