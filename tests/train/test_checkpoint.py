"""A run directory: whose it is, and checkpoints that are whole or not there."""

import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.model.world_model import WorldModel
from simforcing.train.checkpoint import (
    KEEP,
    Progress,
    State,
    checkpoints,
    claim_run,
    cut_log,
    load_weights,
    random_state,
    restore_random,
    resume,
    save_checkpoint,
)
from simforcing.train.config import TrainConfig
from simforcing.train.optim import Average, make_optimizer

CONFIG = TrainConfig(steps=1)


@pytest.fixture
def state(new_model: Callable[..., WorldModel]) -> State:
    """A model and an optimiser that has stepped once."""
    found = fresh(new_model())
    for p in found.model.parameters():
        if p.requires_grad:
            p.grad = torch.full_like(p, 0.1)
    found.optimizer.step()
    return found


def fresh(model: WorldModel) -> State:
    return State(model, make_optimizer(model, CONFIG))


def at(state: State, step: int, seconds: float = 0.0, **more: Any) -> State:
    state.progress = Progress(step, seconds, **more)
    return state


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, in nested dicts and lists."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def names(out: Path) -> list[str]:
    return sorted(p.name for p in (out / "checkpoints").iterdir())


# -- whose directory ----------------------------------------------------------------------------------------------


def test_a_run_directory_is_recognised_whatever_its_description_is_made_of(tmp_path: Path) -> None:
    out = tmp_path / "a" / "run"
    claim_run(out, {"role": "student", "betas": (0.9, 0.95)})
    before = (out / "run.json").read_bytes()
    claim_run(out, {"betas": [0.9, 0.95], "role": "student"})
    assert (out / "run.json").read_bytes() == before
    assert sorted(p.name for p in out.iterdir()) == [".lock", "run.json"]


def test_another_configuration_is_refused_with_what_differs(tmp_path: Path) -> None:
    claim_run(tmp_path / "run", {"role": "student", "training": {"lr": 0.1, "seed": 0}})
    with pytest.raises(SimForcingError) as error:
        claim_run(tmp_path / "run", {"role": "student", "training": {"lr": 0.2, "seed": 0}, "new": 1})
    assert "new: None there, 1 now; training.lr: 0.1 there, 0.2 now" in str(error.value)
    assert "seed" not in str(error.value)
    assert "choose another --out" in str(error.value)


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SimForcingError, match="not empty and not a training run"):
        claim_run(tmp_path, {})
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_settings_that_change_no_result_may_change(tmp_path: Path) -> None:
    claim_run(tmp_path / "run", {"training": {"lr": 0.1, "log_every": 20, "keep": 2}})
    claim_run(tmp_path / "run", {"training": {"lr": 0.1, "log_every": 5, "keep": 9}})
    assert json.loads((tmp_path / "run" / "run.json").read_text())["training"]["lr"] == 0.1
    with pytest.raises(SimForcingError, match="lr"):
        claim_run(tmp_path / "run", {"training": {"lr": 0.2, "log_every": 5, "keep": 9}})


def test_a_damaged_description_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"role":')
    with pytest.raises(SimForcingError, match=r"run\.json is damaged"):
        claim_run(tmp_path, {})


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(SimForcingError, match="cannot write to"):
            claim_run(out, {})


def test_a_start_that_was_killed_while_it_claimed_its_directory_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "run.json.partial-99").write_text('{"ro')
    claim_run(tmp_path, {"role": "student"})
    claim_run(tmp_path, {"role": "student"})
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "run.json"]


HOLDER = """
import sys, time
from pathlib import Path
from simforcing.train.directory import claim_run
claim_run(Path(sys.argv[1]), {"role": "student"})
print("held", flush=True)
time.sleep(120)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such locks there")
def test_two_processes_cannot_work_on_one_run(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(SimForcingError, match="in use by another process; wait for it or choose another --out"):
            claim_run(tmp_path / "run", {"role": "student"})
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    claim_run(tmp_path / "run", {"role": "student"})


# -- the log ------------------------------------------------------------------------------------------------------


def test_the_log_is_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    cut_log(log, 3)
    assert not log.exists()
    log.write_text('{"step": 2}\n{"step": 3}\n{"step": 3, "val": 1}\n{"step": 4}\n{"st')
    cut_log(log, 3)
    assert log.read_text() == '{"step": 2}\n{"step": 3}\n{"step": 3, "val": 1}\n'
    before = log.stat()
    cut_log(log, 3)
    assert log.stat() == before
    cut_log(log, 0)
    assert log.read_text() == ""


# -- saving and resuming --------------------------------------------------------------------------------------------

FILES = [".metadata", "__0_0.distcp", "random-0.json", "trainer.json", "files.json"]


def test_resume_restores_weights_optimiser_average_and_progress(
    tmp_path: Path, state: State, new_model: Callable[..., WorldModel]
) -> None:
    state.average = {k: v + 1 for k, v in Average(state.model, 0.9).values.items()}  # type: ignore[arg-type]
    progress = Progress(7, 1.25, 2, 1, best=0.5, best_step=3)
    saved = save_checkpoint(tmp_path, at(state, 7, 1.25, skipped=2, skipped_in_row=1, best=0.5, best_step=3))
    assert saved == tmp_path / "checkpoints" / "step-00000007"
    assert sorted(p.name for p in saved.iterdir()) == sorted(FILES)
    other = new_model(seed=9)
    found = fresh(other)
    found.average = Average(other, 0.9).values
    unused = {name for name, _ in other.unused_parameters()}
    assert not same(state.tensors(), found.tensors())
    assert resume(tmp_path, found) == found.progress == progress
    assert same(state.tensors(), found.tensors())
    assert same(state.optimizer.state_dict(), found.optimizer.state_dict())
    ours, theirs = state.model.state_dict(), other.state_dict()
    assert all(torch.equal(v, theirs[k]) == (k not in unused) for k, v in ours.items() if v.std() > 0)
    assert float(found.tensors()["optimizer.step"]) == 1


def test_only_weights_or_their_average_can_be_loaded(
    tmp_path: Path, state: State, new_model: Callable[..., WorldModel]
) -> None:
    average = Average(state.model, 0.9)
    average.values["proprio.weight"].fill_(0.25)
    state.average = average.values
    saved, other = save_checkpoint(tmp_path, at(state, 1)), fresh(new_model(seed=9)).model
    load_weights(saved, other)
    assert torch.equal(other.proprio.weight, state.model.proprio.weight)  # type: ignore[arg-type]
    load_weights(saved, other, averaged=True)
    assert other.proprio.weight.eq(0.25).all()  # type: ignore[operator]


def test_generators_go_on_where_they_were(tmp_path: Path, state: State) -> None:
    def draws() -> list[float]:
        legacy = np.random.random()  # noqa: NPY002
        return [random.random(), random.gauss(0, 1), float(legacy), float(torch.rand(()))]

    random.gauss(0, 1)  # the other one of a pair is kept in the state
    kept = json.loads(json.dumps(random_state()))
    first = draws()
    assert draws() != first
    restore_random(kept)
    assert draws() == first


def test_a_new_run_starts_at_zero(tmp_path: Path, state: State) -> None:
    before = {k: v.clone() for k, v in state.tensors().items()}
    assert resume(tmp_path, state) == Progress(0, 0.0)
    assert same(state.tensors(), before)


def test_only_the_last_checkpoints_and_the_best_are_kept(tmp_path: Path, state: State) -> None:
    for step in (7, 8, 9, 10, 100_000_000):
        save_checkpoint(tmp_path, at(state, step, best=1.0, best_step=7))
    assert KEEP == 2
    assert names(tmp_path) == ["step-00000007", "step-00000010", "step-100000000"]
    assert [p.name for p in checkpoints(tmp_path)] == names(tmp_path)
    save_checkpoint(tmp_path, at(state, 100_000_001, best=0.5, best_step=100_000_001), keep=1)
    assert names(tmp_path) == ["step-100000001"]


def test_a_step_that_is_saved_is_not_written_again(tmp_path: Path, state: State) -> None:
    saved = save_checkpoint(tmp_path, at(state, 3))
    before = (saved / "trainer.json").stat()
    assert save_checkpoint(tmp_path, at(state, 3)) == saved
    assert (saved / "trainer.json").stat() == before


def test_resume_removes_what_a_killed_run_left(tmp_path: Path, state: State) -> None:
    save_checkpoint(tmp_path, at(state, 3))
    for leftover in ("step-00000004.partial-17", "step-00000004.partial-17.partial-17"):
        (tmp_path / "checkpoints" / leftover).mkdir()
        (tmp_path / "checkpoints" / leftover / "__0_0.distcp").write_bytes(b"half")
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000003"]
    assert resume(tmp_path, state).step == 3
    assert names(tmp_path) == ["step-00000003"]


def test_a_damaged_newest_checkpoint_is_an_error_that_says_what_to_do(tmp_path: Path, state: State) -> None:
    save_checkpoint(tmp_path, at(state, 3))
    newest = save_checkpoint(tmp_path, at(state, 4))
    whole = {name: (newest / name).read_bytes() for name in FILES}
    for name, content in whole.items():
        flipped = bytearray(content)
        flipped[len(content) // 3] ^= 4
        for damage in (content[: len(content) // 2], b"\x00gar\xffbage" * 9, b"", bytes(flipped), None):
            if damage is None:
                (newest / name).unlink()
            else:
                (newest / name).write_bytes(damage)
            with pytest.raises(
                SimForcingError, match=r"step-00000004.*remove it to resume from the one before"
            ) as error:
                resume(tmp_path, state)
            assert "\n" not in str(error.value)
            assert len(str(error.value)) < 600
            (newest / name).write_bytes(content)
    assert resume(tmp_path, state).step == 4
    shutil.rmtree(newest)
    assert resume(tmp_path, state).step == 3


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


def test_an_index_that_runs_code_is_refused(tmp_path: Path, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    newest = save_checkpoint(tmp_path, at(state, 4))
    (newest / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(SimForcingError, match="remove it"):
        load_weights(newest, state.model)
    assert not (tmp_path / "harmed").exists()


def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, state: State, new_model: Callable[..., WorldModel]
) -> None:
    save_checkpoint(tmp_path, at(state, 3))
    with pytest.raises(SimForcingError, match=r"does not fit the model; unexpected: model\.sim\.blocks"):
        resume(tmp_path, fresh(new_model(sim_condition=False)))


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, state: State) -> None:
    claim_run(tmp_path / "a", {"split": {"val": [1]}, "training": {"log_every": 1}})
    claim_run(tmp_path / "b", {"split": {"val": [2]}, "training": {"log_every": 2}})
    save_checkpoint(tmp_path / "a", at(state, 3))
    shutil.copytree(tmp_path / "a" / "checkpoints", tmp_path / "b" / "checkpoints")
    with pytest.raises(SimForcingError, match=r"belongs to another run \(split\.val: \[1\] there, \[2\] here\)"):
        resume(tmp_path / "b", state)


# -- writes that fail -----------------------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to write longer files, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [50, 5_000, 300_000])
def test_a_failed_write_leaves_the_earlier_checkpoint_intact(tmp_path: Path, state: State, limit: int) -> None:
    """The limits stop the index or the tensors."""
    save_checkpoint(tmp_path, at(state, 3, 1.0))
    with (
        files_of_at_most(limit),
        pytest.raises(SimForcingError, match=r"step-00000004.*earlier checkpoints are intact"),
    ):
        save_checkpoint(tmp_path, at(state, 4))
    assert names(tmp_path) == ["step-00000003"]
    assert resume(tmp_path, state) == Progress(3, 1.0)


def test_a_full_disk_is_named(tmp_path: Path, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, at(state, 3))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(SimForcingError, match=r"step-00000004.*No space left.*earlier checkpoints are intact"):
            save_checkpoint(tmp_path, at(state, 4))
    assert names(tmp_path) == ["step-00000003"]


@pytest.mark.skipif(sys.platform == "win32", reason="other permissions there")
def test_a_read_only_directory_is_an_error(state: State) -> None:
    """As a user whom permissions hold back, also where the tests run as root."""
    with tempfile.TemporaryDirectory() as folder:
        out, nobody = Path(folder), 65534
        save_checkpoint(out, at(state, 3))
        for path in (out, out / "checkpoints"):
            path.chmod(0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(nobody)
        try:
            with pytest.raises(
                SimForcingError, match=r"cannot write checkpoint .*Permission denied; earlier checkpoints"
            ):
                save_checkpoint(out, at(state, 4))
        finally:
            if user == 0:
                os.seteuid(0)
            for path in (out, out / "checkpoints"):
                path.chmod(0o755)
        assert names(out) == ["step-00000003"]


def test_a_file_where_checkpoints_belong_is_an_error(tmp_path: Path, state: State) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(SimForcingError, match="cannot write checkpoint"):
        save_checkpoint(tmp_path, at(state, 4))
