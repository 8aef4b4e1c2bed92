"""The loop: a resumed run is the uninterrupted one to the bit, whatever stopped it; bad steps; rates; lengths."""

import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import simforcing
from simforcing.errors import SimForcingError
from simforcing.model.world_model import WorldModel
from simforcing.train import loop
from simforcing.train.checkpoint import Progress, checkpoints
from simforcing.train.loop import MAX_BAD_STEPS, Run, TrainConfig, make_optimizer, step_generator, train
from simforcing.train.objective import Batch
from simforcing.train.roles import single_loss

EACH = {"checkpoint_seconds": 0.0}  # a checkpoint after every step
HELPERS = Path(__file__).with_name("conftest.py")
NewRun = Callable[..., Run]


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
    x, y = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert x.keys() == y.keys()
    assert all(torch.equal(x[k], y[k]) for k in x)
    s, t = optimizer_of(a), optimizer_of(b)
    assert s["param_groups"] == t["param_groups"]
    assert s["state"].keys() == t["state"].keys()
    for key, state in s["state"].items():
        assert all(torch.equal(state[k], t["state"][key][k]) for k in state)


def optimizer_of(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(checkpoint / "trainer.pt", weights_only=True)["optimizer"]
    return state


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


@pytest.mark.parametrize("kills", [(1,), (5,), (12,), (3, 4, 9)])
def test_a_resumed_run_equals_the_uninterrupted_one(
    new_run: NewRun, tmp_path: Path, uninterrupted: Path, kills: tuple[int, ...]
) -> None:
    for step in kills:
        with pytest.raises(Killed):
            train(new_run(tmp_path / "run", config=EACH, report=stop_at(step)))
        found = checkpoints(tmp_path / "run")
        assert (found[-1].name if found else "none") == (f"step-{step - 1:08d}" if step > 1 else "none")
    assert train(new_run(tmp_path / "run", config=EACH)).step == 12
    assert_same_checkpoint(checkpoints(tmp_path / "run")[-1], uninterrupted)


def test_every_term_is_logged(uninterrupted: Path) -> None:
    log = rows(uninterrupted.parents[1])
    assert [row["step"] for row in log] == list(range(1, 13))
    terms = {"flow_real", "flow_syn", "motion_real", "motion_syn", "total"}
    assert log[0].keys() == terms | {"step", "seconds", "grad_norm", "lr"}
    assert all(math.isfinite(v) for row in log for v in row.values())


def test_checkpoints_apart_in_time_resume_from_the_last_one(
    new_run: NewRun, tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes one second of a made-up clock; checkpoints more than three seconds apart."""
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=iter(range(1000)).__next__))
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
    saved = load_file(checkpoints(tmp_path / "run")[-1] / "model.safetensors")
    assert all(torch.equal(v, saved[k]) for k, v in model.state_dict().items())


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


@pytest.mark.timeout(600)
def test_a_killed_process_resumes_to_the_same_end(new_run: NewRun, tmp_path: Path) -> None:
    """The system ends it, between any two instructions, while it writes a checkpoint after every step.

    An alarm that nothing handles ends a process as `kill -9` does; unlike that, it cannot come too late.
    """
    steps, out = 100, tmp_path / "killed"
    environment = os.environ | {"PYTHONPATH": str(Path(simforcing.__file__).parents[1])}
    delay = 0.001 + 0.3 * random.SystemRandom().random()
    command = [sys.executable, "-c", SCRIPT, str(HELPERS), str(out), str(steps), str(delay)]
    ended = subprocess.run(command, env=environment, timeout=540, check=False)
    assert ended.returncode == -signal.SIGALRM
    assert 2 <= int(checkpoints(out)[-1].name.removeprefix("step-")) < steps, delay
    assert train(new_run(out, config={"steps": steps})).step == steps
    train(new_run(tmp_path / "whole", config={"steps": steps}))
    assert_same_checkpoint(checkpoints(out)[-1], checkpoints(tmp_path / "whole")[-1])
    assert not [p.name for p in out.rglob("*") if "partial" in p.name]


def test_a_step_can_be_drawn_again_alone() -> None:
    a, b, other, seed = (torch.rand(4, generator=step_generator(*x)) for x in ((7, 3), (7, 3), (7, 4), (8, 3)))
    assert torch.equal(a, b)
    assert not torch.equal(a, other)
    assert not torch.equal(a, seed)


def test_validation_changes_nothing_and_is_logged(new_run: NewRun, tmp_path: Path, uninterrupted: Path) -> None:
    modes: list[tuple[str, bool]] = []

    def validate(model: WorldModel) -> dict[str, float]:
        modes.append(("validate", model.training))
        torch.rand(3)
        return {"flow": 0.5}

    run = new_run(tmp_path / "run", config={"validate_seconds": 0.0}, validate=validate)
    loss = run.loss

    def watched(model: WorldModel, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        modes.append(("step", model.training))
        return loss(model, batch, generator)

    run.loss = watched
    train(run)
    assert modes == [("step", True), ("validate", False)] * 12 + [("validate", False)]
    log = rows(tmp_path / "run")
    assert [row["step"] for row in log if row.get("val_flow") == 0.5] == [*range(1, 13), 12]
    assert_same_checkpoint(checkpoints(tmp_path / "run")[-1], uninterrupted)


# -- steps that cannot be taken -------------------------------------------------------------------------------------


def failing(loss: loop.Loss, at: set[int]) -> loop.Loss:
    """The loss, not a number at these calls."""
    count = iter(range(1000))

    def bad(model: WorldModel, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        terms = loss(model, batch, generator)
        return terms | {"total": terms["total"] * math.nan} if next(count) in at else terms

    return bad


def test_a_step_without_a_finite_gradient_changes_nothing_and_is_logged(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", config={"steps": 4, "log_every": 100})
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    run.loss = failing(run.loss, {0, 1, 2, 3})
    assert train(run).step == 4
    assert all(torch.equal(v, before[k]) for k, v in run.model.state_dict().items())
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]
    assert not optimizer_of(checkpoints(tmp_path / "run")[-1])["state"]


def test_training_goes_on_after_fewer_than_ten_bad_steps(new_run: NewRun, tmp_path: Path) -> None:
    assert MAX_BAD_STEPS == 10
    run = new_run(tmp_path / "run", config={"steps": 24})
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    run.loss = failing(run.loss, set(range(9)) | set(range(10, 19)))
    assert train(run).step == 24
    assert all(torch.isfinite(v).all() for v in run.model.state_dict().values())
    assert not torch.equal(run.model.video.proj_out.weight, before["video.proj_out.weight"])


def test_ten_bad_steps_in_a_row_are_an_error_that_names_the_clips(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", config={"steps": 30, **EACH})
    run.loss = failing(run.loss, set(range(2, 30)))
    names = run.clips.names(3, run.config.seed, 11)
    with pytest.raises(SimForcingError) as error:
        train(run)
    assert str(error.value) == f"10 steps in a row without a finite gradient; last clips: {', '.join(names)}"
    assert names[0].startswith("episode 1")
    assert checkpoints(tmp_path / "run")[-1].name == "step-00000011"


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


@pytest.mark.parametrize("total", [40, 205])
def test_rate_is_the_released_one(parity: Path, total: int) -> None:
    released = load_file(parity / "extras.safetensors")[f"lr.total{total}"].tolist()
    config = TrainConfig(steps=total)
    assert len(released) >= total
    ours = [config.lr * config.rate(Progress(step)) for step in range(len(released))]
    assert ours == pytest.approx(released, rel=1e-6)


def test_logged_rate_is_the_one_that_the_step_took(uninterrupted: Path) -> None:
    config = TrainConfig(steps=12, lr=1e-2)
    log = rows(uninterrupted.parents[1])
    assert [row["lr"] for row in log] == pytest.approx([1e-2 * config.rate(Progress(i)) for i in range(12)])
    groups = optimizer_of(uninterrupted)["param_groups"]
    assert [g["lr"] for g in groups] == pytest.approx([log[-1]["lr"]] * len(groups))


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
    train(new_run(tmp_path / "run", config={"steps": 2, "sim_lr_scale": 4.0}))
    groups = optimizer_of(checkpoints(tmp_path / "run")[-1])["param_groups"]
    plain, scaled = ({g["lr"] for g in groups if g["scale"] == s} for s in (1.0, 4.0))
    assert [4 * r for r in plain] == pytest.approx(list(scaled))


def test_the_norm_of_gradients_is_clipped(new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rate of zero and a clip of 0.01, the first moment that Adam keeps is a tenth of the clipped gradient."""
    train(new_run(tmp_path / "run", config={"steps": 1, "clip": 0.01, "betas": (0.9, 0.95)}))
    state = optimizer_of(checkpoints(tmp_path / "run")[-1])["state"]
    norm = math.sqrt(sum(float(s["exp_avg"].square().sum()) for s in state.values()))
    assert rows(tmp_path / "run")[0]["grad_norm"] > 0.1
    assert norm == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_a_run_of_seconds_ends_when_they_are_spent(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=iter(range(1000)).__next__))
    changes = {"steps": None, "seconds": 6.5, "lr": 1e-3}
    assert train(new_run(tmp_path / "run", config=changes)) == Progress(7, 7.0)
    config = TrainConfig(seconds=6.5, lr=1e-3)
    assert [row["lr"] for row in rows(tmp_path / "run")] == pytest.approx(
        [1e-3 * config.rate(Progress(i, float(i))) for i in range(7)]
    )


def test_seconds_spent_before_a_stop_count(new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=iter(range(1000)).__next__))
    changes = {"steps": None, "seconds": 6.5, **EACH}
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
    run = new_run(tmp_path / "run", model=new_model(sim_condition=False), loss=single_loss)
    run.clips = run.clips.one_domain("sim")
    train(run)
    assert rows(tmp_path / "run")[0].keys() == {"step", "seconds", "flow", "total", "grad_norm", "lr"}


def mean_loss(run: Run) -> float:
    """Over all clips with twelve fixed draws."""
    batch = run.clips.take(torch.arange(len(run.clips)))
    with torch.no_grad():
        return sum(float(run.loss(run.model, batch, step_generator(99, i))["total"]) for i in range(12)) / 12


def test_training_lowers_the_loss(new_run: NewRun, tmp_path: Path) -> None:
    """Ten clips of noise, learnt by heart a little."""
    run = new_run(tmp_path / "run", config={"steps": 40, "lr": 5e-3})
    before = mean_loss(run)
    train(run)
    assert mean_loss(run) < 0.9 * before
