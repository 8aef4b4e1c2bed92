"""The loop: a resumed run is the uninterrupted one to the bit, whatever stopped it; bad steps; rates; lengths."""

import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import Tensor

import simforcing
from simforcing.errors import SimForcingError
from simforcing.model.world_model import WorldModel
from simforcing.train import loop
from simforcing.train.batches import LatentClips
from simforcing.train.checkpoint import Progress, State, checkpoints, resume
from simforcing.train.config import TrainConfig
from simforcing.train.loop import Run, Stopped, clip_generator, places_of, train
from simforcing.train.objective import Batch, Draws
from simforcing.train.optim import make_optimizer
from simforcing.train.parallel import Team
from simforcing.train.roles import flow_loss

MEASURED = {f"seconds_{part}" for part in ("data", "forward", "backward", "optimizer")} | {
    "steps_per_second", "memory_gib"
}  # fmt: skip
EACH = {"checkpoint_seconds": 0.0}  # a checkpoint after every step
HELPERS = Path(__file__).with_name("conftest.py")
NewRun = Callable[..., Run]


def made_up_clock() -> SimpleNamespace:
    """Advances by a second when it is asked, as a step does when it begins and when it ends."""
    return SimpleNamespace(perf_counter=iter(range(1000)).__next__)


class Killed(Exception):
    """Stands for whatever ends a process."""


def stop_at(step: int) -> Callable[[float, dict[str, Any]], None]:
    """A report that raises at this step, before its checkpoint is written."""

    def report(passed: float, row: dict[str, Any]) -> None:
        if row["step"] == step:
            raise Killed

    return report


def assert_same_checkpoint(a: Path, b: Path) -> None:
    """Weights and optimiser state, to the bit."""
    assert a.name == b.name
    x, y = tensors_of(a), tensors_of(b)
    assert x.keys() == y.keys()
    assert all(torch.equal(x[k], y[k]) for k in x)


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """What a checkpoint holds, read without the code under test."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    file = checkpoint.parents[1] / f"{checkpoint.name}.pt"
    dcp_to_torch_save(str(checkpoint), str(file))
    found: dict[str, Tensor] = torch.load(file, weights_only=True)
    file.unlink()
    return found


def losses(out: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["total"]) for row in rows(out) if "total" in row]


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of 12 steps in one go."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("train_helpers", HELPERS)
    assert spec is not None
    assert spec.loader is not None
    helpers = importlib.util.module_from_spec(spec)
    sys.modules["train_helpers"] = helpers
    spec.loader.exec_module(helpers)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("loop") / "whole"
    assert train(helpers.student_run(out)).step == 12
    torch.set_num_threads(threads)
    return checkpoints(out)[-1]


# -- stopping and resuming ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [(1,), (3, 4)])
def test_a_resumed_run_equals_the_uninterrupted_one(
    new_run: NewRun, tmp_path: Path, uninterrupted: Path, kills: tuple[int, ...]
) -> None:
    for step in kills:
        with pytest.raises(Killed):
            train(new_run(tmp_path / "run", config=EACH, report=stop_at(step)))
        found = checkpoints(tmp_path / "run")
        assert (found[-1].name if found else "none") == (f"step-{step - 1:08d}" if step > 1 else "none")
    assert train(new_run(tmp_path / "run")).step == 12
    assert_same_checkpoint(checkpoints(tmp_path / "run")[-1], uninterrupted)


def test_every_term_is_logged(uninterrupted: Path) -> None:
    log = rows(uninterrupted.parents[1])
    assert [row["step"] for row in log] == list(range(1, 13))
    terms = {"flow_real", "flow_syn", "motion_real", "motion_syn", "total"}
    assert log[0].keys() == terms | {"step", "seconds", "grad_norm", "lr"} | MEASURED
    assert all(math.isfinite(v) for row in log for v in row.values())
    parts = sum(log[0][f"seconds_{k}"] for k in ("data", "forward", "backward", "optimizer"))
    assert 0 < parts < 1.1 / log[0]["steps_per_second"]
    assert 0.05 < log[0]["memory_gib"] < 50


def test_checkpoints_apart_in_time_resume_from_the_last_one(
    new_run: NewRun, tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes one second of a made-up clock; checkpoints more than three seconds apart."""
    monkeypatch.setattr(loop, "time", made_up_clock())
    with pytest.raises(Killed):
        train(new_run(tmp_path / "run", config={"checkpoint_seconds": 3.0}, report=stop_at(11)))
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step-00000004", "step-00000008"]
    train(new_run(tmp_path / "run", config={"checkpoint_seconds": 3.0}))
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step-00000008", "step-00000012"]
    assert_same_checkpoint(checkpoints(tmp_path / "run")[-1], uninterrupted)


def test_a_finished_run_is_not_trained_further(new_run: NewRun, tmp_path: Path) -> None:
    train(new_run(tmp_path / "run"))
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    model = new_run(tmp_path / "run").model
    run = new_run(tmp_path / "run", model=model)
    assert train(run).step == 12
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == before
    saved = tensors_of(checkpoints(tmp_path / "run")[-1])
    assert all(torch.equal(p, saved[f"model.{k}"]) for k, p in model.named_parameters() if p.requires_grad)


SCRIPT = """
import importlib.util, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("train_helpers", sys.argv[1])
helpers = importlib.util.module_from_spec(spec)
sys.modules["train_helpers"] = helpers
spec.loader.exec_module(helpers)
from simforcing.train.loop import train

def report(passed, row):
    if row["step"] == 3:
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[4]))

config = {"steps": int(sys.argv[3]), "checkpoint_seconds": 0.0}
train(helpers.student_run(Path(sys.argv[2]), config=config, report=report))
"""


def killed(out: Path, steps: int, delay: float) -> None:
    """Starts a run that saves after every step; the system ends it `delay` seconds after its third."""
    environment = os.environ | {"PYTHONPATH": str(Path(simforcing.__file__).parents[1])}
    command = [sys.executable, "-c", SCRIPT, str(HELPERS), str(out), str(steps), str(delay)]
    ended = subprocess.run(command, env=environment, timeout=540, check=False)
    assert ended.returncode == -signal.SIGALRM


@pytest.mark.timeout(600)
def test_a_killed_process_resumes_to_the_same_end(new_run: NewRun, tmp_path: Path) -> None:
    """Ended between any two instructions, while it writes a checkpoint after every step.

    An alarm that nothing handles ends a process as `kill -9` does; unlike that, it cannot come too late.
    """
    steps, out, delay = 24, tmp_path / "killed", 0.001 + 0.5 * random.SystemRandom().random()
    killed(out, steps, delay)
    found = int(checkpoints(out)[-1].name.removeprefix("step-"))
    logged = max(row["step"] for row in rows(out))
    assert 2 <= found < steps, delay
    assert found >= logged - 1, "more than the interval was lost"
    config = {"steps": steps, "checkpoint_seconds": 1e9}
    assert train(new_run(out, config=config)).step == steps
    train(new_run(tmp_path / "whole", config=config))
    assert_same_checkpoint(checkpoints(out)[-1], checkpoints(tmp_path / "whole")[-1])
    assert losses(out) == losses(tmp_path / "whole")
    assert not [p.name for p in out.rglob("*") if "partial" in p.name]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_kills_at_25_moments_lose_no_more_than_the_interval(new_run: NewRun, tmp_path: Path) -> None:
    draws, steps = random.Random(0), 1000
    for i in range(25):
        out = tmp_path / f"run-{i}"
        killed(out, steps, 0.001 + 1.5 * draws.random())
        logged = max(row["step"] for row in rows(out))
        run = new_run(out, config={"steps": steps})
        state = State(run.model, make_optimizer(run.model, run.config))
        assert logged - 1 <= resume(out, state).step <= logged
        assert all(torch.isfinite(t).all() for t in state.tensors().values())
        assert not [p.name for p in out.rglob("*") if "partial" in p.name]


def test_forty_steps_are_seventeen_and_the_rest(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is gone when step 18 is logged, one step after a checkpoint; another one goes on."""
    monkeypatch.setattr(loop, "time", made_up_clock())
    config = {"steps": 40, "ema": 0.9}

    def vanish(passed: float, row: dict[str, Any]) -> None:
        if row["step"] == 18:
            os._exit(9)

    (child := multiprocessing.get_context("fork").Process(target=_train_quietly, args=(
        new_run(tmp_path / "run", config=config | {"checkpoint_seconds": 16.5}, report=vanish),
    ))).start()  # fmt: skip
    child.join(240)
    assert child.exitcode == 9
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step-00000017"]
    assert train(new_run(tmp_path / "run", config=config)).step == 40
    train(new_run(tmp_path / "whole", config=config))
    assert_same_checkpoint(checkpoints(tmp_path / "run")[-1], checkpoints(tmp_path / "whole")[-1])
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 41))


def _train_quietly(run: Run) -> None:
    torch.set_num_threads(1)
    train(run)


def test_sigterm_saves_and_stops(new_run: NewRun, tmp_path: Path, uninterrupted: Path) -> None:
    def ask(passed: float, row: dict[str, Any]) -> None:
        if row["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        train(new_run(tmp_path / "run", report=ask))
    assert stopped.value.code == 143
    assert stopped.value.step in (5, 6)  # the signal came while step 5 was logged
    assert signal.getsignal(signal.SIGTERM) is before
    assert [p.name for p in checkpoints(tmp_path / "run")] == [f"step-{stopped.value.step:08d}"]
    train(new_run(tmp_path / "run"))
    assert_same_checkpoint(checkpoints(tmp_path / "run")[-1], uninterrupted)


def test_a_clip_can_be_drawn_again_alone(new_clips: Callable[..., LatentClips], new_run: NewRun) -> None:
    a, b, other, seed = (torch.rand(4, generator=clip_generator(*x)) for x in ((7, 3), (7, 3), (7, 4), (8, 3)))
    assert torch.equal(a, b)
    assert not torch.equal(a, other)
    assert not torch.equal(a, seed)
    clips, objective, config = new_clips(), flow_loss(), TrainConfig(steps=1, batch_size=4)
    assert config.clips(2) == 8
    model = new_run(Path("unused"), claim=False).model

    def draw(size: int, places: range) -> Draws:
        rows = clips.take(torch.arange(size))
        return objective.draw(model, rows, [clip_generator(7, place) for place in places])

    whole, second = draw(4, range(4)), draw(1, range(1, 2))
    for name in ("noise", "timestep", "gate", "keep", "spread", "corruption"):
        assert torch.equal(getattr(whole, name)[1:2], getattr(second, name)), name
    assert len(whole.timestep.unique()) == 4


def test_processes_and_passes_share_the_clips_of_a_step() -> None:
    config = TrainConfig(steps=1, batch_size=2, accumulate=3)
    teams = [Team(rank, 2, "ddp") for rank in range(2)]
    step = 5
    places = [p for team in teams for turn in range(3) for p in places_of(config, step * 3 + turn, team)]
    assert sorted(places) == list(range(step * 12, (step + 1) * 12))
    assert config.clips(2) == 12


def test_passes_add_up_to_the_step_that_takes_all_clips_at_once(new_run: NewRun, tmp_path: Path) -> None:
    train(new_run(tmp_path / "one", config={"steps": 6, "batch_size": 4}))
    train(new_run(tmp_path / "two", config={"steps": 6, "batch_size": 2, "accumulate": 2}))
    one, two = (losses(tmp_path / name) for name in ("one", "two"))
    assert [a for a, _ in one] == [b for b, _ in two]
    assert [a for _, a in one] == pytest.approx([b for _, b in two], abs=2e-6)


def test_validation_changes_nothing_and_is_logged(new_run: NewRun, tmp_path: Path, uninterrupted: Path) -> None:
    modes: list[tuple[str, bool]] = []

    def validate(model: WorldModel) -> dict[str, float]:
        modes.append(("validate", model.training))
        torch.rand(3)
        return {"flow": 0.5}

    run = new_run(tmp_path / "run", config={"validate_seconds": 0.0, "keep": 100}, validate=validate)
    run.loss = Watched(run.loss, lambda model, terms: modes.append(("step", model.training)) or terms)
    assert train(run).best_step == 1
    assert modes == [("step", True), ("validate", False)] * 12 + [("validate", False)]
    log = rows(tmp_path / "run")
    assert [row["step"] for row in log if row.get("val_flow") == 0.5] == [*range(1, 13), 12]
    assert_same_checkpoint(checkpoints(tmp_path / "run")[-1], uninterrupted)
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step-00000001", "step-00000012"]


def test_the_best_by_validation_is_kept(new_run: NewRun, tmp_path: Path) -> None:
    found = iter([3.0, 2.0, 1.0, 2.5, 1.5, 1.2, 5.0])
    run = new_run(
        tmp_path / "run",
        config={"steps": 6, "validate_seconds": 0.0, **EACH},
        validate=lambda model: {"flow": next(found)},
    )
    done = train(run)
    assert (done.best, done.best_step) == (1.0, 3)
    kept = ["step-00000003", "step-00000005", "step-00000006"]
    assert [p.name for p in checkpoints(tmp_path / "run")] == kept
    assert train(new_run(tmp_path / "run", config={"steps": 6})).best_step == 3


def test_rollouts_are_watched_every_so_many_steps(new_run: NewRun, tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    def rollout(step: int, model: WorldModel) -> dict[str, float]:
        seen.append((step, model.training))
        return {"rollout_psnr": 20.0}

    train(new_run(tmp_path / "run", config={"rollout_every": 5}, rollout=rollout))
    assert seen == [(5, False), (10, False)]
    assert [row["step"] for row in rows(tmp_path / "run") if row.get("rollout_psnr") == 20.0] == [5, 10]


def test_the_average_follows_the_weights_and_becomes_the_result(new_run: NewRun, tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def validate(model: WorldModel) -> dict[str, float]:
        seen.append(model.video.proj_out.weight.detach().clone())
        return {}

    plain: list[Tensor] = []

    def after(model: WorldModel, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        plain.append(model.video.proj_out.weight.detach().clone())
        return terms

    run = new_run(tmp_path / "run", config={"steps": 4, "ema": 0.75, "validate_seconds": 0.0}, validate=validate)
    run.loss = Watched(run.loss, after)
    train(run)
    saved = tensors_of(checkpoints(tmp_path / "run")[-1])
    weights = [*plain[1:], saved["model.video.proj_out.weight"]]
    average = plain[0]
    for i, weight in enumerate(weights):
        average = 0.75 * average + 0.25 * weight
        torch.testing.assert_close(seen[i], average)
    assert torch.equal(saved["average.video.proj_out.weight"], run.model.video.proj_out.weight.detach())
    assert not torch.equal(saved["model.video.proj_out.weight"], run.model.video.proj_out.weight.detach())


# -- steps that cannot be taken -------------------------------------------------------------------------------------


class Watched:
    """A loss whose terms are looked at, or changed."""

    def __init__(self, loss: loop.Loss, look: Callable[[WorldModel, dict[str, Tensor]], dict[str, Tensor]]) -> None:
        self.loss, self.look, self.teacher = loss, look, loss.teacher

    def draw(self, model: WorldModel, batch: Batch, generators: Sequence[torch.Generator]) -> Draws:
        return self.loss.draw(model, batch, generators)

    def __call__(self, model: WorldModel, batch: Batch, draws: Draws) -> dict[str, Tensor]:
        return self.look(model, self.loss(model, batch, draws))


def failing(loss: loop.Loss, at: set[int], factor: float = math.nan) -> Watched:
    """The loss, not a number (or infinite) at these calls."""
    count = iter(range(1000))

    def look(model: WorldModel, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        return terms | {"total": terms["total"] * factor} if next(count) in at else terms

    return Watched(loss, look)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_step_without_a_finite_loss_changes_nothing_and_is_logged(
    new_run: NewRun, tmp_path: Path, factor: float
) -> None:
    run = new_run(tmp_path / "run", config={"steps": 4, "log_every": 100})
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    run.loss = failing(run.loss, {0, 1, 2, 3}, factor)
    assert train(run) == Progress(4, ANY, skipped=4, skipped_in_row=4)
    assert all(torch.equal(v, before[k]) for k, v in run.model.state_dict().items())
    log = rows(tmp_path / "run")
    assert [(row["step"], row["skipped_step"], row["skipped"], row["total"]) for row in log] == [
        (i, i, i, None) for i in (1, 2, 3, 4)
    ]
    assert [row["skipped_clips"] for row in log] == [run.clips.names(3, run.config.seed, i) for i in range(4)]
    saved = tensors_of(checkpoints(tmp_path / "run")[-1])
    assert all(not v.any() for k, v in saved.items() if k.startswith("optimizer."))


def test_a_skipped_step_is_as_if_it_had_not_been(new_run: NewRun, tmp_path: Path) -> None:
    """Its successor finds weights and moments as they were; only the schedule has moved on."""
    run = new_run(tmp_path / "run", config={"steps": 3})
    run.loss = failing(run.loss, {1})
    train(run)
    assert float(tensors_of(checkpoints(tmp_path / "run")[-1])["optimizer.step"]) == 2


def test_training_goes_on_after_fewer_than_ten_bad_steps(new_run: NewRun, tmp_path: Path) -> None:
    assert TrainConfig(steps=1).max_skipped == 10
    run = new_run(tmp_path / "run", config={"steps": 24})
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    run.loss = failing(run.loss, set(range(9)) | set(range(10, 19)))
    assert train(run).step == 24
    assert all(torch.isfinite(v).all() for v in run.model.state_dict().values())
    assert not torch.equal(run.model.video.proj_out.weight, before["video.proj_out.weight"])


def test_too_many_bad_steps_in_a_row_are_an_error_that_names_the_clips(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", config={"steps": 30, "max_skipped": 4, **EACH})
    run.loss = failing(run.loss, set(range(2, 30)))
    names = run.clips.names(3, run.config.seed, 5)
    with pytest.raises(SimForcingError) as error:
        train(run)
    assert str(error.value) == f"4 steps in a row without a finite loss and gradient; last clips: {', '.join(names)}"
    assert names[0].startswith("episode 1")
    assert checkpoints(tmp_path / "run")[-1].name == "step-00000005"


def test_a_log_that_cannot_be_written_is_an_error(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    (tmp_path / "run" / "log.jsonl").mkdir()
    with pytest.raises(SimForcingError, match=r"cannot write .*log\.jsonl"):
        train(run)


# -- rates, groups, lengths -----------------------------------------------------------------------------------------


def test_rate_rises_to_one_and_falls_along_a_cosine_to_its_last_value() -> None:
    config = TrainConfig(steps=200, warmup=0.1, final_lr=0.2)
    rates = [config.rate(Progress(step)) for step in range(201)]
    assert [rates[i] for i in (0, 10, 20)] == pytest.approx([1 / 20, 0.525, 1])
    assert rates[110] == pytest.approx(0.6)
    assert rates[80] == pytest.approx(0.2 + 0.8 * 0.75)
    assert rates[200] == pytest.approx(0.2)
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert TrainConfig(steps=1).final_lr == 0.01
    assert TrainConfig(steps=1, warmup=0.0).rate(Progress()) == 1
    assert TrainConfig(steps=1).rate(Progress()) == 1  # too short for a warm-up
    assert TrainConfig(seconds=1.0, warmup=0.0).rate(Progress()) == 1


def test_a_run_of_seconds_begins_at_a_small_rate_that_is_not_zero() -> None:
    config = TrainConfig(seconds=100.0, warmup=0.1, final_lr=0.2)
    rates = [config.rate(Progress(7, seconds)) for seconds in (0.0, 5.0, 10.0, 55.0, 100.0, 103.0)]
    assert rates == pytest.approx([0.01, 0.505, 1, 0.6, 0.2, 0.2])


def test_logged_rate_is_the_one_that_the_step_took(uninterrupted: Path) -> None:
    config = TrainConfig(steps=12, lr=1e-2)
    log = rows(uninterrupted.parents[1])
    assert [row["lr"] for row in log] == pytest.approx([1e-2 * config.rate(Progress(i)) for i in range(12)])


def test_matrices_decay_and_nothing_else_does(new_model: Callable[..., WorldModel]) -> None:
    model = new_model()
    optimizer = make_optimizer(model, TrainConfig(steps=1, weight_decay=0.25, sim_lr_scale=3.0))
    names = {id(p): name for name, p in model.named_parameters()}
    group = {names[id(p)]: g for g in optimizer.param_groups for p in g["params"]}
    unused = {name for name, _ in model.unused_parameters()}
    assert group.keys() == {n for n, _ in model.named_parameters()} - unused
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(group)
    assert unused
    assert all(p.requires_grad == (n not in unused) for n, p in model.named_parameters())
    for name in ("video.blocks.0.attn1.to_q.weight", "video.patch_embedding.weight", "sim.blocks.1.weight"):
        assert group[name]["weight_decay"] == 0.25
    for name, parameter in model.named_parameters():
        if name in group and (parameter.ndim == 1 or "scale_shift_table" in name):
            assert group[name]["weight_decay"] == 0, name
        if name in group:
            assert group[name]["scale"] == (3.0 if name.startswith("sim.") else 1.0)
    tables = {n for n in group if "scale_shift_table" in n}
    assert len(tables) == 5  # two blocks of both experts, and the video head


def test_rate_of_the_simulation_projections_is_scaled(new_run: NewRun, tmp_path: Path) -> None:
    """After one step Adam has moved every weight by its rate, whatever the gradient (decay left out)."""
    run = new_run(tmp_path / "run", config={"steps": 1, "sim_lr_scale": 4.0, "weight_decay": 0.0, "lr": 1e-3})
    before = {k: v.detach().clone() for k, v in run.model.named_parameters()}
    train(run)
    for name in ("sim.blocks.0.weight", "video.proj_out.weight"):
        moved = (dict(run.model.named_parameters())[name].detach() - before[name]).abs().median()
        assert float(moved) == pytest.approx(4e-3 if name.startswith("sim.") else 1e-3, rel=0.02), name


def test_the_norm_of_gradients_is_clipped(new_run: NewRun, tmp_path: Path) -> None:
    """With a clip of 0.01, the first moment that Adam keeps is a tenth of the clipped gradient."""
    train(new_run(tmp_path / "run", config={"steps": 1, "clip": 0.01, "betas": (0.9, 0.95)}))
    saved = tensors_of(checkpoints(tmp_path / "run")[-1])
    norm = math.sqrt(sum(float(v.square().sum()) for k, v in saved.items() if k.endswith(".exp_avg")))
    assert rows(tmp_path / "run")[0]["grad_norm"] > 0.1
    assert norm == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_a_run_of_seconds_ends_when_they_are_spent(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "time", made_up_clock())
    changes = {"steps": None, "seconds": 6.5, "lr": 1e-3}
    assert train(new_run(tmp_path / "run", config=changes)) == Progress(7, 7.0)
    config = TrainConfig(seconds=6.5, lr=1e-3)
    assert [row["lr"] for row in rows(tmp_path / "run")] == pytest.approx(
        [1e-3 * config.rate(Progress(i, float(i))) for i in range(7)]
    )


def test_seconds_spent_before_a_stop_count(new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "time", made_up_clock())
    changes = {"steps": None, "seconds": 6.5, "checkpoint_seconds": 3.0}
    with pytest.raises(Killed):
        train(new_run(tmp_path / "run", config=changes, report=stop_at(5)))
    assert train(new_run(tmp_path / "run", config=changes)) == Progress(7, 7.0)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "changes",
    [{}, {"steps": 3, "seconds": 1.0}, {"steps": 0}, {"steps": -2}, {"seconds": 0.0}, {"seconds": -1.0}],
)
def test_a_run_has_one_positive_length(changes: dict[str, Any]) -> None:
    with pytest.raises(SimForcingError, match="length"):
        TrainConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch size 0"),
        ({"accumulate": 0}, "accumulate 0"),
        ({"keep": 0}, "keep 0"),
        ({"ema": 1.0}, r"ema 1\.0"),
        ({"lr": 0.0}, r"learning rate 0\.0"),
        ({"lr": math.nan}, "learning rate nan"),
        ({"warmup": 1.0}, r"warmup 1\.0"),
        ({"warmup": -0.1}, r"warmup -0\.1"),
    ],
)
def test_settings_that_train_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SimForcingError, match=message):
        TrainConfig(steps=1, **changes)


def test_a_teacher_is_trained_by_the_same_loop(
    new_run: NewRun, new_model: Callable[..., WorldModel], tmp_path: Path
) -> None:
    run = new_run(tmp_path / "run", model=new_model(sim_condition=False), loss=flow_loss())
    run.clips = run.clips.one_domain("sim")
    train(run)
    assert rows(tmp_path / "run")[0].keys() == {"step", "seconds", "flow", "total", "grad_norm", "lr"} | MEASURED


def mean_loss(run: Run) -> float:
    """Over all clips with twelve fixed draws."""
    batch = run.clips.take(torch.arange(len(run.clips)))
    with torch.no_grad():
        every = [[clip_generator(99, 100 * i + j) for j in range(len(run.clips))] for i in range(12)]
        return sum(float(run.loss(run.model, batch, run.loss.draw(run.model, batch, g))["total"]) for g in every) / 12


def test_training_lowers_the_loss(new_run: NewRun, tmp_path: Path) -> None:
    """Ten clips of noise, learnt by heart a little."""
    run = new_run(tmp_path / "run", config={"steps": 40, "lr": 5e-3})
    before = mean_loss(run)
    train(run)
    assert mean_loss(run) < 0.9 * before
