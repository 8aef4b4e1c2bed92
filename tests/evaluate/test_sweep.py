"""Which cells a sweep has, which of them need no work of their own, and what it makes of them."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from simforcing.errors import SimForcingError
from simforcing.evaluate import sweep as s
from simforcing.evaluate.protocol import Protocol, hash_clips
from simforcing.evaluate.report.collect import sweep_view
from simforcing.evaluate.results import Result
from simforcing.model.experts import ExpertConfig
from simforcing.model.world_model import WorldModel, WorldModelConfig

WEIGHTS, STEPS = (0.0, 0.3, 0.6, 1.0), (1, 5, 10, 20)
WINDOWS = [(e, 0) for e in range(6)]


def steps(seeds: tuple[int, ...] = (0,)) -> s.Plan:
    return s.Plan("steps", s.steps_plan(1, STEPS, STEPS, WEIGHTS, seeds))


def guidance(seeds: tuple[int, ...] = (0,), blind: tuple[int, ...] = (0,)) -> s.Plan:
    return s.Plan("guidance", s.guidance_plan((0.0, 0.3, 0.7, 1.0), WEIGHTS, 1, 10, seeds), frozenset(blind))


def test_sixty_four_cells_need_fifty_two_measurements() -> None:
    plan = steps()
    assert len(plan.cells) == len(plan.settings) == 64
    work = plan.work()
    assert len(work) == 4 * 4 * 3 + 4  # with w = 0 the simulation's steps do not matter
    unconditioned = [cell.setting for cell in work if cell.setting.w == 0]
    assert {c.sim_steps for c in unconditioned} == {0} and {c.real_steps for c in unconditioned} == set(STEPS)
    assert {plan.measured_by(cell) for cell in plan.cells} == set(work)


def test_a_checkpoint_that_no_simulation_reaches_is_measured_once_for_all_weights() -> None:
    plan = guidance(seeds=(0, 1))
    assert len(plan.settings) == 16 and len(plan.cells) == 32
    assert Counter(cell.checkpoint for cell in plan.work()) == {0: 2, 1: 8, 2: 8, 3: 8}
    assert len(guidance(blind=()).work()) == 16


def test_the_order_is_random_and_the_same_each_time() -> None:
    plan = steps(seeds=(0, 1, 2))
    assert plan.work() == plan.work() != plan.work(seed=1)
    first = [cell.setting.real_steps for cell in plan.work()[:40]]
    assert first != sorted(first) and len(set(first)) == 4


def test_what_simulation_can_reach() -> None:
    expert = ExpertConfig(dim=24, ffn_dim=24, num_layers=1, num_heads=1, head_dim=24, text_dim=8, freq_dim=8)
    model = WorldModel(WorldModelConfig(expert, expert, channels=4))
    assert s.is_blind(model)
    assert model.sim is not None
    with torch.no_grad():
        model.sim.layers[0].bias[0] = 1e-6  # type: ignore[index]
    assert not s.is_blind(model)
    assert s.is_blind(WorldModel(WorldModelConfig(expert, expert, channels=4, sim_condition=False)))


def measured(cell: s.Cell, value: float, code: str = "1") -> Result:
    setting, rng = cell.setting, np.random.default_rng(5)
    simulates = setting.w != 0
    protocol = Protocol(
        "ab", hash_clips(WINDOWS), len(WINDOWS), 5, 5.0, 32, 32, setting.sim_steps if simulates else None,
        setting.real_steps, setting.w, cell.seed, code=code,
    )  # fmt: skip
    psnr = (value + rng.normal(0, 0.1, len(WINDOWS))).tolist()
    latency = {"real stage": [0.1 * setting.real_steps, 9.0, 0.1 * setting.real_steps], "decoding": [0.05]}
    if simulates:
        latency["simulation stage"] = [0.1 * setting.sim_steps]
    return Result(str(setting), "m", "x", protocol, WINDOWS, ["t"] * 6, {"psnr": psnr}, latency=latency)


def quality(cell: s.Cell) -> float:
    return 20 + 3 * (1 - abs(cell.setting.w - 0.6)) + math.log(cell.setting.real_steps) + 0.1 * cell.seed


def write(out: Path, plan: s.Plan, cells: list[s.Cell], code: str = "1") -> None:
    s.begin(out, plan, {"checkpoints": ["m"], "simulation": "predicted", "part": "val"})
    for cell in cells:
        measured(cell, quality(cell), code).save(s.cell_file(out, cell))


def test_a_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    plan = steps()
    work = plan.work()
    write(tmp_path, plan, work[:30])
    assert s.missing(tmp_path, plan) == work[30:]
    part = s.Sweep.load(tmp_path)
    assert 0 < len(part.outcomes) < 64 and part.total == 64
    write(tmp_path, plan, work[30:])
    assert s.missing(tmp_path, plan) == []


def test_outcomes_have_quality_over_seeds_and_latency_by_stage(tmp_path: Path) -> None:
    plan = steps(seeds=(0, 1))
    write(tmp_path, plan, plan.work())
    found = s.Sweep.load(tmp_path)
    assert len(found.outcomes) == 64 and found.notes == []
    best = found.best("psnr")
    assert best is not None and (best.setting.w, best.setting.real_steps, best.runs) == (0.6, 20, 2)
    assert best.metrics["psnr"]["mean"] == pytest.approx(20 + 3 + math.log(20) + 0.05, abs=0.15)
    at = {(o.setting.sim_steps, o.setting.real_steps, o.setting.w): o for o in found.outcomes}
    assert at[5, 10, 0.6].seconds == pytest.approx({"simulation stage": 0.5, "real stage": 1.0, "decoding": 0.05})
    assert at[5, 10, 0.6].latency == pytest.approx(1.55)
    assert at[1, 10, 0.0].metrics == at[20, 10, 0.0].metrics
    assert at[20, 10, 0.0].latency == pytest.approx(1.05)  # no simulation is needed
    assert found.best("fvd") is None


def test_cells_of_different_code_are_not_mixed_silently(tmp_path: Path) -> None:
    plan = steps()
    work = plan.work()
    write(tmp_path, plan, work[:30])
    write(tmp_path, plan, work[30:], code="2")
    with pytest.raises(SimForcingError, match="differ in 'code'"):
        s.Sweep.load(tmp_path)
    (note,) = s.Sweep.load(tmp_path, allow=["code"]).notes
    assert "not measured alike" in note


def test_a_folder_that_is_no_sweep_is_named(tmp_path: Path) -> None:
    with pytest.raises(SimForcingError, match="no sweep"):
        s.Sweep.load(tmp_path)
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(SimForcingError, match="no sweep of this version"):
        s.Sweep.load(tmp_path)


def test_the_page_of_a_steps_sweep(tmp_path: Path) -> None:
    plan = steps()
    write(tmp_path, plan, [c for c in plan.work() if c.setting.real_steps < 20])
    view = sweep_view(s.Sweep.load(tmp_path), "steps")
    assert "48 of 64 settings measured, 1 run each" in " ".join(view.notes)
    titles = {curve.title for curve in view.curves}
    assert "PSNR against real steps (simulation steps: 1)" in titles and "Latency by stage, w = 0.6" in titles
    (grid,) = view.grids
    assert (len(grid.rows), grid.columns) == (12, ["w = 0", "w = 0.3", "w = 0.6", "w = 1"])
    assert len(view.points) == 48
    row = grid.rows.index("1 + 10 steps")
    assert grid.best == max(c["mean"] for r in grid.cells for c in r if c is not None)
    assert grid.seconds[row][0] < grid.seconds[row][1]


def test_the_page_of_a_guidance_sweep(tmp_path: Path) -> None:
    plan = guidance()
    write(tmp_path, plan, plan.work())
    view = sweep_view(s.Sweep.load(tmp_path), "guidance")
    by = {(c.title, c.name): c for c in view.curves}
    flat = by["PSNR against w", "p = 0"]
    assert list(flat.x) == [0, 0.3, 0.6, 1] and len({v["mean"] for v in flat.values}) == 1  # no dependence on w
    assert list(by["PSNR against p", "w = 0.6"].x) == [0, 0.3, 0.7, 1]
    assert view.grids[0].rows == ["p = 0", "p = 0.3", "p = 0.7", "p = 1"]
