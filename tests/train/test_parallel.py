"""Processes that train together follow one alone; weights go from any number of processes to any other."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import simforcing
from simforcing.errors import SimForcingError
from simforcing.model.world_model import WorldModel
from simforcing.train import loop
from simforcing.train.checkpoint import Progress, State, checkpoints, resume
from simforcing.train.loop import Run, train
from simforcing.train.lora import add_adapters, merged, share_frozen
from simforcing.train.optim import make_optimizer
from simforcing.train.parallel import Arrangement, Team, arranged, assembled, blocks, whole

HELPERS = Path(__file__).with_name("conftest.py")
NewRun = Callable[..., Run]
CPU = torch.device("cpu")
FOUR = {"batch_size": 4}

# Trains in a team as the options say, resuming as ever; each process writes the whole weights that it ends with.
SCRIPT = """
import importlib.util, json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("train_helpers", sys.argv[1])
helpers = importlib.util.module_from_spec(spec)
sys.modules["train_helpers"] = helpers
spec.loader.exec_module(helpers)
from simforcing.train.loop import train
from simforcing.train.parallel import Arrangement, assembled, whole
from simforcing.train.validate import validation
out, options = Path(sys.argv[2]), json.loads(sys.argv[3])
with assembled(options["kind"], torch.device("cpu")) as team:
    for name, config in options["runs"].items():
        run = helpers.student_run(out / name, config=config, claim=team.main, layers=2)
        run.team, run.arrangement = team, Arrangement(getattr(torch, options["compute"]), options["recompute"])
        run.validate = validation(run.clips, team=team)
        train(run)
        state = whole(run.model, team).state_dict()
        if team.main:
            torch.save(state, out / name / "whole.pt")
"""


def together(
    out: Path, size: int, kind: str, runs: dict[str, Any], compute: str = "float32", recompute: bool = False
) -> None:
    """Starts processes as torchrun would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = json.dumps({"kind": kind, "runs": runs, "compute": compute, "recompute": recompute})
    started = []
    for rank in range(size):
        environment = os.environ | {
            "PYTHONPATH": str(Path(simforcing.__file__).parents[1]), "RANK": str(rank), "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-c", SCRIPT, str(HELPERS), str(out), options]
        started.append(subprocess.Popen(command, env=environment))
    try:
        assert [process.wait(280) for process in started] == [0] * size
    finally:
        for process in started:
            process.kill()


def curve(out: Path) -> list[float]:
    """All losses of a run, in order; the last are validation's."""
    names = ("flow_real", "flow_syn", "motion_real", "motion_syn", "total", "val_flow", "val_flow_0.3", "val_flow_sim")
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row[name] for row in rows for name in names if name in row]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 steps of four clips in one process."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("train_helpers", HELPERS)
    assert spec is not None and spec.loader is not None
    helpers = importlib.util.module_from_spec(spec)
    sys.modules["train_helpers"] = helpers
    spec.loader.exec_module(helpers)
    from simforcing.train.validate import validation

    out = tmp_path_factory.mktemp("alone")
    run = helpers.student_run(out / "run", config={"steps": 20, **FOUR}, layers=2)
    run.validate = validation(run.clips)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(run)
    torch.set_num_threads(threads)
    torch.save(run.model.state_dict(), out / "run" / "whole.pt")
    return out / "run"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_follow_one_and_their_checkpoint_is_read_by_one(
    tmp_path: Path, alone: Path, kind: str, new_run: NewRun
) -> None:
    """Half of the clips each; the checkpoint after 20 steps then goes on alone, as the run that was alone does."""
    together(tmp_path, 2, kind, {"run": {"steps": 20, "batch_size": 2}}, recompute=kind == "fsdp")
    one, two = curve(alone), curve(tmp_path / "run")
    assert len(one) == len(two) == 20 * 5 + 3
    assert one == pytest.approx(two, abs=1e-5)
    weights, theirs = (torch.load(p / "whole.pt", weights_only=True) for p in (alone, tmp_path / "run"))
    assert weights.keys() == theirs.keys()
    assert all(torch.allclose(theirs[k], v, atol=1e-3) for k, v in weights.items())
    run = new_run(tmp_path / "run", config={"steps": 20}, claim=False, layers=2)
    state = State(run.model, make_optimizer(run.model, run.config))
    assert resume(tmp_path / "run", state).step == 20
    assert all(torch.equal(theirs[k], v) for k, v in run.model.state_dict().items())
    assert float(state.tensors()["optimizer.step"]) == 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkpoint_of_two_sharded_processes_is_read_by_four_and_by_one(tmp_path: Path, alone: Path) -> None:
    """18 steps on two, then the last two on four or on one, with the clips of a step kept."""
    config = {"steps": 20, "checkpoint_seconds": 0.0, "keep": 3}
    together(tmp_path, 2, "fsdp", {"run": {**config, "batch_size": 2}})
    for name, size, batch in (("four", 4, 1), ("one", 1, 4)):
        shutil.copytree(tmp_path / "run", tmp_path / name, ignore=shutil.ignore_patterns("whole.pt", ".lock"))
        found = checkpoints(tmp_path / name)
        assert [p.name for p in found][-2:] == ["step-00000019", "step-00000020"]
        for later in found[-2:]:
            shutil.rmtree(later)
        together(tmp_path, size, "fsdp", {name: {**config, "batch_size": batch}})
        assert curve(tmp_path / name) == pytest.approx(curve(alone), abs=1e-5)
        two, now = (torch.load(tmp_path / n / "whole.pt", weights_only=True) for n in ("run", name))
        assert all(torch.allclose(now[k], v, atol=1e-4) for k, v in two.items())


# -- one process ----------------------------------------------------------------------------------------------------


def gradients(model: WorldModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_step(run: Run, team: Team = Team(), arrangement: Arrangement = Arrangement()) -> dict[str, torch.Tensor]:
    """Gradients of the first step, whole."""
    trained = arranged(run.model, run.loss.teacher, team, arrangement)
    make_optimizer(run.model, run.config)
    batch = run.clips.batch(4, 0, 0)
    draws = run.loss.draw(run.model, batch, [loop.clip_generator(0, i) for i in range(4)])
    trained(lambda model: run.loss(model, batch, draws))["total"].backward()
    found = {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in found.items()}


def test_computing_blocks_again_changes_no_gradient(new_run: NewRun, tmp_path: Path) -> None:
    kept = one_step(new_run(tmp_path / "a", layers=2))
    again_run = new_run(tmp_path / "b", layers=2)
    calls: list[int] = []
    again_run.model.video.layers[1].ffn.register_forward_hook(lambda *_: calls.append(1))
    again = one_step(again_run, arrangement=Arrangement(recompute=True))
    assert kept.keys() == again.keys()
    assert all(torch.equal(v, again[k]) for k, v in kept.items())
    assert len(calls) == 2


def test_bfloat16_is_computed_in_and_float32_is_what_is_trained(new_run: NewRun, tmp_path: Path) -> None:
    """Alone, alone with recomputed blocks, and sharded (over one process): the same arithmetic."""
    half = torch.bfloat16
    full = one_step(new_run(tmp_path / "full", layers=2))
    run = new_run(tmp_path / "half", layers=2)
    seen: set[torch.dtype] = set()
    run.model.video.layers[0].ffn.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    found = one_step(run, arrangement=Arrangement(half))
    assert seen == {half}
    assert run.loss.teacher is not None and run.loss.teacher.dtype == half
    assert {p.dtype for p in run.model.parameters()} == {g.dtype for g in found.values()} == {torch.float32}
    for name, gradient in full.items():
        assert torch.linalg.norm(found[name] - gradient) < 0.05 * torch.linalg.norm(gradient) + 1e-4, name
    again = one_step(new_run(tmp_path / "again", layers=2), arrangement=Arrangement(half, recompute=True))
    assert all(torch.equal(v, again[k]) for k, v in found.items())
    with assembled("fsdp", CPU) as team:
        sharded = one_step(new_run(tmp_path / "fsdp", layers=2), team, Arrangement(half, recompute=True))
    assert sharded.keys() == found.keys()
    for name, gradient in found.items():
        assert torch.linalg.norm(sharded[name] - gradient) < 0.01 * torch.linalg.norm(gradient) + 1e-5, name


def test_a_sharded_step_that_is_not_finite_is_skipped(new_run: NewRun, tmp_path: Path) -> None:
    with assembled("fsdp", CPU) as team:
        run = new_run(tmp_path / "run", config={"steps": 2}, team=team)
        before = whole(run.model, team).state_dict()
        run.clips.real[:] = float("nan")  # type: ignore[index]
        assert train(run).skipped == 2
        after = whole(run.model, team).state_dict()
    assert all(torch.equal(v, after[k]) for k, v in before.items())


def test_every_block_is_sharded_and_the_teacher_is_neither_trained_nor_saved(new_run: NewRun, tmp_path: Path) -> None:
    with assembled("fsdp", CPU) as team:
        run = new_run(tmp_path / "run", config={"steps": 1}, team=team, layers=2)
        teacher = run.loss.teacher
        assert teacher is not None
        before = {k: v.clone() for k, v in teacher.state_dict().items()}
        train(run)
        for network in (run.model, teacher):
            kinds = [type(block).__name__ for block in blocks(network)]
            assert kinds == ["FSDPBlock"] * 4
        state = State(run.model, make_optimizer(run.model, run.config))
        trained = {id(p) for group in state.optimizer.param_groups for p in group["params"]}
        assert not trained & {id(p) for p in teacher.parameters()}
        assert not any(p.requires_grad for p in teacher.parameters())
        assert all(torch.equal(v.full_tensor(), before[k]) for k, v in teacher.state_dict().items())


def test_several_processes_without_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SimForcingError, match="2 processes with --parallel none"), assembled("none", CPU):
        pass


def test_one_process_is_a_team_of_its_own() -> None:
    with assembled("auto", CPU) as team:
        assert team == Team()
    assert team.on_main(lambda: 3) == 3
    assert team.agreed(2.5, True) == (2.5, True)
    with pytest.raises(SimForcingError, match="no"):
        team.on_main(lambda: (_ for _ in ()).throw(SimForcingError("no")))


# -- adapters -------------------------------------------------------------------------------------------------------


def test_adapters_start_as_nothing_and_are_merged_into_plain_weights(
    new_run: NewRun, tmp_path: Path, new_model: Callable[..., WorldModel]
) -> None:
    run = new_run(tmp_path / "run", config={"steps": 3}, layers=2)
    plain = {k: v.clone() for k, v in run.model.state_dict().items()}
    add_adapters(run.model, rank=2)
    assert all(torch.equal(v, plain[k]) for k, v in merged(run.model.state_dict()).items())
    trained = {n for n, p in run.model.named_parameters() if p.requires_grad}
    assert all(n.endswith((".up", ".down")) or n.startswith(("sim.", "proprio.")) for n in trained)
    assert "video.blocks.1.attn1.to_out.0.up" in trained and "action.blocks.0.ffn.net.2.down" in trained
    assert not any(n.startswith("action.blocks.1.ffn") for n in trained)  # no output depends on it
    assert train(run) == Progress(3, run_seconds(tmp_path / "run"))
    result = whole(run.model, Team())
    moved = {k for k, v in result.state_dict().items() if not torch.equal(v, plain[k])}
    assert "video.blocks.0.attn1.to_q.weight" in moved and "video.proj_out.weight" not in moved
    batch = run.clips.batch(4, 0, 0)
    draws = run.loss.draw(run.model, batch, [loop.clip_generator(0, i) for i in range(4)])
    ours, theirs = (float(run.loss(m, batch, draws)["total"].detach()) for m in (run.model, result))
    assert ours == pytest.approx(theirs, rel=1e-5)


def run_seconds(out: Path) -> float:
    return float(json.loads((checkpoints(out)[-1] / "trainer.json").read_text())["progress"]["seconds"])


def test_student_and_teacher_hold_frozen_weights_once(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", layers=2)
    teacher = run.loss.teacher
    assert teacher is not None
    add_adapters(run.model, rank=2)
    share_frozen(run.model, teacher)
    theirs = {p.data_ptr() for p in teacher.parameters()}
    for name, parameter in run.model.named_parameters():
        assert (parameter.data_ptr() in theirs) == (not parameter.requires_grad), name


def test_a_rank_below_one_is_refused(new_model: Callable[..., WorldModel]) -> None:
    with pytest.raises(SimForcingError, match="rank 0"):
        add_adapters(new_model(), 0)
