"""Rows of a run: JSON lines always, trackers where they are."""

import builtins
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from simforcing.train.log import Clock, Log, memory_gib


class Writer:
    """Stands for TensorBoard's."""

    def __init__(self, folder: str, purge_step: int, flush_secs: int) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.scalars: list[tuple[str, float, int]] = []
        WRITERS.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        pass


WRITERS: list[Writer] = []


def without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("torch.utils.tensorboard", "tensorboard")):
            raise ModuleNotFoundError(f"No module named {name!r}", name="tensorboard")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", importing)


def test_rows_are_json_whatever_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_tensorboard(monkeypatch)
    (tmp_path / "log.jsonl").write_text('{"step": 3}\n{"step": 5}\n')
    log = Log(tmp_path, step=3)
    log.write({"step": 4, "total": float("nan"), "skipped_clips": ["episode 1 start 0"]})
    rows = [json.loads(line, parse_constant=None) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows == [{"step": 3}, {"step": 4, "total": None, "skipped_clips": ["episode 1 start 0"]}]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl"]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    Log(tmp_path, step=0, main=False).write({"step": 1})
    assert not list(tmp_path.iterdir())


def test_tensorboard_gets_the_numbers_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    WRITERS.clear()
    log = Log(tmp_path, step=7)
    log.write({"step": 8, "total": 0.5, "bad": float("inf"), "skipped_clips": ["a"]})
    (writer,) = WRITERS
    assert (writer.folder, writer.purge_step) == (str(tmp_path / "tensorboard"), 8)
    assert writer.scalars == [("total", 0.5, 8)]


def test_tensorboard_itself_can_read_them(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    Log(tmp_path, step=0).write({"step": 1, "total": 0.5})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("total")] == [(1, 0.5)]


def test_weights_and_biases_gets_run_and_numbers_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_tensorboard(monkeypatch)
    told: list[Any] = []
    run = SimpleNamespace(log=lambda numbers, step: told.append((step, numbers)))
    fake = SimpleNamespace(init=lambda **settings: told.append(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    out = tmp_path / "student"
    out.mkdir()
    (out / "run.json").write_text('{"role": "student"}')
    Log(out, step=0, wandb="robots").write({"step": 2, "total": 0.5})
    assert told[0] == {
        "project": "robots", "name": "student", "id": "student", "dir": str(out), "config": {"role": "student"},
        "resume": "allow",
    }  # fmt: skip
    assert told[1:] == [(2, {"total": 0.5})]


def test_the_parts_of_a_step_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 4.0, 10.0, 12.0, 13.0, 20.0])
    monkeypatch.setattr("simforcing.train.log.time", SimpleNamespace(perf_counter=times.__next__))
    clock = Clock(torch.device("cpu"))
    for _ in range(2):
        clock.start()
        clock.mark("data")
        clock.mark("forward")
    assert clock.read(2) == {"seconds_data": 1.5, "seconds_forward": 2.0}
    assert clock.read(2) == {}


def test_memory_is_that_of_this_process() -> None:
    assert 0.05 < memory_gib(torch.device("cpu")) < 100
