"""A run directory: whose it is, and checkpoints that are whole or not there."""

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.model.world_model import WorldModel, load_world_model
from simforcing.train.checkpoint import (
    KEEP,
    Progress,
    checkpoints,
    claim_run,
    cut_log,
    resume,
    save_checkpoint,
)
from simforcing.train.loop import TrainConfig, make_optimizer

CONFIG = TrainConfig(steps=1)


@pytest.fixture
def state(new_model: Callable[..., WorldModel]) -> tuple[WorldModel, torch.optim.AdamW]:
    """A model and an optimiser that has stepped once."""
    return stepped(new_model())


def stepped(model: WorldModel, times: int = 1) -> tuple[WorldModel, torch.optim.AdamW]:
    optimizer = make_optimizer(model, CONFIG)
    for _ in range(times):
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.full_like(p, 0.1)
        optimizer.step()
    return model, optimizer


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
from simforcing.train.checkpoint import claim_run
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


def test_resume_restores_weights_optimiser_and_progress(
    tmp_path: Path, state: tuple[WorldModel, torch.optim.AdamW], new_model: Callable[..., WorldModel]
) -> None:
    model, optimizer = state
    saved = save_checkpoint(tmp_path, model, optimizer, Progress(7, 1.25))
    assert saved == tmp_path / "checkpoints" / "step-00000007"
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "model.safetensors", "trainer.pt"]
    other = new_model(seed=9)
    fresh = make_optimizer(other, CONFIG)
    assert not same(model.state_dict(), other.state_dict())
    assert resume(tmp_path, other, fresh) == Progress(7, 1.25)
    assert same(model.state_dict(), other.state_dict())
    assert same(optimizer.state_dict(), fresh.state_dict())
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in model.parameters()]
    assert same(load_world_model(saved).state_dict(), model.state_dict())


def test_a_new_run_starts_at_zero(tmp_path: Path, state: tuple[WorldModel, torch.optim.AdamW]) -> None:
    before = {k: v.clone() for k, v in state[0].state_dict().items()}
    assert resume(tmp_path, *state) == Progress(0, 0.0)
    assert same(state[0].state_dict(), before)


def test_only_the_last_checkpoints_are_kept(tmp_path: Path, state: tuple[WorldModel, torch.optim.AdamW]) -> None:
    for step in (8, 9, 10, 100_000_000):
        save_checkpoint(tmp_path, *state, Progress(step))
    assert KEEP == 2
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000010", "step-100000000"]
    assert names(tmp_path) == ["step-00000010", "step-100000000"]


def test_a_step_that_is_saved_is_not_written_again(tmp_path: Path, state: tuple[WorldModel, torch.optim.AdamW]) -> None:
    saved = save_checkpoint(tmp_path, *state, Progress(3))
    before = (saved / "trainer.pt").stat()
    assert save_checkpoint(tmp_path, *state, Progress(3)) == saved
    assert (saved / "trainer.pt").stat() == before


def test_resume_removes_what_a_killed_run_left(tmp_path: Path, state: tuple[WorldModel, torch.optim.AdamW]) -> None:
    save_checkpoint(tmp_path, *state, Progress(3))
    for leftover in ("step-00000004.partial-17", "step-00000004.partial-17.partial-17"):
        (tmp_path / "checkpoints" / leftover).mkdir()
        (tmp_path / "checkpoints" / leftover / "model.safetensors").write_bytes(b"half")
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000003"]
    assert resume(tmp_path, *state).step == 3
    assert names(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("name", ["trainer.pt", "model.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["short", "garbage", "empty", "gone"])
def test_a_damaged_newest_checkpoint_is_an_error_that_says_what_to_do(
    tmp_path: Path, state: tuple[WorldModel, torch.optim.AdamW], name: str, damage: str
) -> None:
    save_checkpoint(tmp_path, *state, Progress(3))
    newest = save_checkpoint(tmp_path, *state, Progress(4))
    whole = (newest / name).read_bytes()
    if damage == "gone":
        (newest / name).unlink()
    else:
        content = {"short": whole[: len(whole) // 2], "garbage": b"\x00gar\xffbage" * 9, "empty": b""}
        (newest / name).write_bytes(content[damage])
    with pytest.raises(SimForcingError, match=r"step-00000004.*remove it to resume from the one before") as error:
        resume(tmp_path, *state)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_after_removing_it_the_one_before_is_resumed(
    tmp_path: Path, state: tuple[WorldModel, torch.optim.AdamW]
) -> None:
    save_checkpoint(tmp_path, *state, Progress(3))
    newest = save_checkpoint(tmp_path, *state, Progress(4))
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    assert resume(tmp_path, *state).step == 3


def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, state: tuple[WorldModel, torch.optim.AdamW], new_model: Callable[..., WorldModel]
) -> None:
    save_checkpoint(tmp_path, *state, Progress(3))
    other = new_model(sim_condition=False)
    with pytest.raises(SimForcingError, match=r"unexpected: sim\.blocks"):
        resume(tmp_path, other, make_optimizer(other, CONFIG))


def test_a_full_disk_leaves_the_earlier_checkpoint_intact(
    tmp_path: Path, state: tuple[WorldModel, torch.optim.AdamW], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, *state, Progress(3, 1.0))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(SimForcingError, match=r"step-00000004.*No space left.*earlier checkpoints are intact"):
            save_checkpoint(tmp_path, *state, Progress(4))
    assert names(tmp_path) == ["step-00000003"]
    assert resume(tmp_path, *state) == Progress(3, 1.0)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to write longer files, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [500, 20_000, 200_000])
def test_a_real_failed_write_leaves_the_earlier_checkpoint_intact(
    tmp_path: Path, state: tuple[WorldModel, torch.optim.AdamW], limit: int
) -> None:
    """The limits stop the configuration, the weights, and the optimiser's state."""
    first = save_checkpoint(tmp_path, *state, Progress(3))
    sizes = {p.name: p.stat().st_size for p in first.iterdir()}
    assert 500 < sizes["config.json"] < 20_000 < sizes["model.safetensors"] < 200_000 < sizes["trainer.pt"]
    with files_of_at_most(limit), pytest.raises(SimForcingError, match="earlier checkpoints are intact"):
        save_checkpoint(tmp_path, *state, Progress(4))
    assert names(tmp_path) == ["step-00000003"]
    assert resume(tmp_path, *state).step == 3


def test_a_file_where_checkpoints_belong_is_an_error(
    tmp_path: Path, state: tuple[WorldModel, torch.optim.AdamW]
) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(SimForcingError, match="cannot write checkpoint"):
        save_checkpoint(tmp_path, *state, Progress(4))


@pytest.mark.parametrize("content", [{"optimizer": None}, {"seconds": 1.0}, []])
def test_a_checkpoint_without_its_progress_is_damaged(
    tmp_path: Path, state: tuple[WorldModel, torch.optim.AdamW], content: Any
) -> None:
    newest = save_checkpoint(tmp_path, *state, Progress(3))
    if isinstance(content, dict) and "seconds" in content:
        content = {"optimizer": state[1].state_dict()} | content
    torch.save(content, newest / "trainer.pt")
    with pytest.raises(SimForcingError, match=r"step-00000003 is damaged: trainer\.pt: .*; remove it to resume"):
        resume(tmp_path, *state)
