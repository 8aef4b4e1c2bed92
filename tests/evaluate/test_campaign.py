"""The study: its units fit together, the rule decides as it says, work is shared and resumed, the page says it."""

import json
import math
import multiprocessing
import os
import re
import signal
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simforcing.errors import SimForcingError
from simforcing.evaluate.campaign import page, plan
from simforcing.evaluate.campaign.claimed import ours, paper
from simforcing.evaluate.campaign.claims import Best, Claim, Contrast, cell, over_range, saved, together
from simforcing.evaluate.campaign.plan import METHODS, REGIMES, RETENTIONS, WAYS, Sizes, Unit, reference, units
from simforcing.evaluate.campaign.queue import held, missing, spent, work
from simforcing.evaluate.campaign.speed import Speed, minutes, ratio, seconds_of
from simforcing.evaluate.metrics import definitions
from simforcing.evaluate.protocol import Protocol
from simforcing.evaluate.results import Result
from simforcing.evaluate.statistics import Interval
from simforcing.train.presets import preset

EPISODES = 12


def result(values: np.ndarray, **more: Any) -> Result:
    """A result whose PSNR, moving PSNR and SSIM are given, two clips an episode."""
    protocol = Protocol("split", "clips", len(values), 13, 5.0, 64, 64, metrics=definitions(), machine={}, code="x")
    windows = [(i // 2, i % 2) for i in range(len(values))]
    columns = {key: values.tolist() for key in ("psnr", "psnr_moving", "ssim")}
    return Result("x", "m", "0", protocol, windows, ["t"] * len(values), columns, **more)


def results(mean: float, seeds: int = 3, spread: float = 0.3, seed: int = 0, **more: Any) -> list[Result]:
    """Clips differ much, in the same way for all; seeds and noise little."""
    clips = np.random.default_rng(99).normal(0, 3, 2 * EPISODES)
    rng = np.random.default_rng(seed)
    return [result(mean + clips + rng.normal(0, spread, 2 * EPISODES), **more) for _ in range(seeds)]


# -- units ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [Sizes(), Sizes.small()], ids=["whole", "small"])
def test_every_need_is_somebodys_file_and_can_be_met(sizes: Sizes) -> None:
    found = units(sizes)
    files = [unit.file for unit in found]
    assert len(set(files)) == len(files)
    done: set[str] = set()
    while len(done) < len(found):
        ready = {u.file for u in found if u.file not in done and set(u.needs) <= done}
        assert ready, f"never to be done: {[u.file for u in found if u.file not in done][:3]}"
        done |= ready


def test_the_study_has_the_baselines_the_sweeps_and_three_seeds() -> None:
    sizes = Sizes()
    found = units(sizes)
    trained = Counter(u.task.method for u in found if isinstance(u.task, plan.Training))
    assert trained == dict.fromkeys(METHODS, 3)
    assert len(plan.sweep_plan(sizes, "guidance").settings) == 16
    assert len(plan.sweep_plan(sizes, "steps").settings) == 64
    cells = [u.task.cell for u in found if isinstance(u.task, plan.SweepCell)]
    # p = 0 is measured once a seed, the others under every w; w = 0 once whatever the simulation's steps
    assert len(cells) == 3 * (1 + 3 * 4) + 2 * (4 + 3 * 16)
    methods = plan.checkpoints_of(sizes, "guidance")
    assert [methods[i][0] for i in sorted(plan.sweep_plan(sizes, "guidance").blind)] == ["no-conditioning"] * 3


def test_methods_name_presets_data_and_teachers_that_there_are() -> None:
    for name, method in METHODS.items():
        taught = method.teacher != ""
        role = preset(method.preset, "teacher" if "teacher-" in name else _role(method.preset), taught).role
        assert (role == "teacher") == (method.data in ("augmented", "plain"))
        assert method.teacher in ("", "bundled") or METHODS[method.teacher].preset == "teacher"
    assert {*plan.MEASURED, *plan.TUNED} <= set(METHODS)
    assert {way for ways in plan.MEASURED.values() for way in ways} <= set(WAYS)
    for full, plain in REGIMES.values():
        assert (METHODS[full].data, METHODS[full].times) == (METHODS[plain].data, METHODS[plain].times)
        assert (METHODS[full].equal, METHODS[plain].equal) == ("steps", "time")


def _role(name: str) -> Any:
    from simforcing.train.presets import PRESETS

    return PRESETS[name].role


@pytest.mark.parametrize("sizes", [Sizes(), Sizes.small()], ids=["whole", "small"])
def test_claims_are_about_what_the_study_measures(sizes: Sizes) -> None:
    settings = {reference(t.method, t.way) for t in (u.task for u in units(sizes)) if isinstance(t, plan.Measurement)}
    for sweep in plan.SWEEPS:
        settings |= {
            cell(sweep, s.w, s.retention, (s.sim_steps, s.real_steps)) for s in plan.sweep_plan(sizes, sweep).settings
        }
    small = sizes == Sizes.small()
    for claim in (*paper(sizes), *ours()):
        for test in claim.tests:
            named = {test.claimed, *test.others} if isinstance(test, Best) else {test.a, test.b}
            assert named <= settings, named - settings
        assert claim.tests or claim.why
    best = [t for c in paper(sizes) for t in c.tests if isinstance(t, Best)]
    assert [1 + len(t.others) for t in best] == ([16, 64] if not small else [16, 24])
    assert len(RETENTIONS) * len(sizes.weights) == 16


# -- the rule -------------------------------------------------------------------------------------------------------


def interval(low: float, high: float) -> Interval:
    return Interval(mean=(low + high) / 2, low=low, high=high, clips=10, missing=0)


@pytest.mark.parametrize(
    ("wanted", "low", "high", "outcome"),
    [
        ("more", 0.01, 0.3, "holds"),
        ("more", -0.01, 0.3, "not decided"),
        ("more", -0.3, -0.01, "does not hold"),
        ("less", -0.3, -0.01, "holds"),
        ("less", 0.01, 0.3, "does not hold"),
        ("same", -0.09, 0.09, "holds"),
        ("same", -0.09, 0.11, "not decided"),
        ("same", 0.11, 0.2, "does not hold"),
        ("same", -0.2, -0.11, "does not hold"),
        ("no less", -0.09, 0.5, "holds"),
        ("no less", -0.11, 0.5, "not decided"),
        ("no less", -0.5, -0.11, "does not hold"),
        ("more", math.nan, math.nan, "not measured"),
    ],
)
def test_an_interval_decides(wanted: Any, low: float, high: float, outcome: str) -> None:
    assert Contrast("a", "b", wanted).outcome(interval(low, high)) == outcome


@given(st.floats(-2, 2), st.floats(0, 2), st.sampled_from(["more", "less", "same", "no less"]))
def test_an_interval_around_a_boundary_decides_nothing(middle: float, width: float, wanted: Any) -> None:
    test = Contrast("a", "b", wanted)
    outcome = test.outcome(interval(middle - width, middle + width))
    if wanted in ("more", "less") and width >= abs(middle):
        assert outcome == "not decided"
    if wanted == "same" and width > 0.1 and abs(middle) < width - 0.1:
        assert outcome == "not decided"
    if wanted in ("more", "less"):
        other = Contrast("b", "a", "less" if wanted == "more" else "more")
        assert other.outcome(interval(-middle - width, -middle + width)) == outcome


def test_a_mean_without_an_interval_decides_nothing() -> None:
    one = Interval(mean=3.0, low=math.nan, high=math.nan, clips=1, missing=0)
    assert Contrast("a", "b").outcome(one) == "not decided"


def test_a_claim_needs_all_its_tests() -> None:
    assert together(["holds", "holds"]) == "holds"
    assert together(["holds", "not decided"]) == together(["holds", "not measured"]) == "not decided"
    assert together(["holds", "does not hold", "not measured"]) == "does not hold"
    assert together([]) == together(["not measured"]) == "not measured"


def test_differences_are_measured_over_clips_and_seeds() -> None:
    measured = {"a": results(20.0, seed=1), "b": results(19.5, seed=2), "c": results(19.98, seed=3)}
    judged = Claim("", (Contrast("a", "b"),)).judged(measured)
    assert judged.outcome == "holds" and abs(judged.found[0]["mean"] - 0.5) < 0.15
    assert judged.found[0]["high"] - judged.found[0]["low"] < 1  # clips that differ by 3 dB are compared pairwise
    assert set(judged.shown[0]) == {"psnr_moving", "ssim", "arm_track"}
    assert judged.p[0] < 0.05 and not judged.small
    assert judged.to_dict()["tests"][0]["p"] == judged.p[0]
    assert Claim("", (Contrast("a", "c"),)).judged(measured).small  # 0.02 dB apart
    assert not Claim("", (Contrast("a", "c", "same"),)).judged(measured).small
    assert math.isnan(Claim("", (Contrast("a", "missing"),)).judged(measured).p[0])
    assert Claim("", (Contrast("b", "a"),)).judged(measured).outcome == "does not hold"
    assert Claim("", (Contrast("a", "c"),)).judged(measured).outcome == "not decided"
    assert Claim("", (Contrast("a", "missing"),)).judged(measured).outcome == "not measured"


def test_seeds_of_the_same_models_are_drawn_together() -> None:
    level = np.array([18.0, 20.0, 22.0])  # trainings that differ much
    a, b = ([result(v + gain + np.zeros(2 * EPISODES)) for v in level] for gain in (0.2, 0.0))
    measured = {"a": a, "b": b}
    assert Contrast("a", "b", paired=True).difference(measured)["low"] == pytest.approx(0.2)
    assert Contrast("a", "b").difference(measured)["low"] < -1
    assert Claim("", (Contrast("a", "b", paired=True),)).judged(measured).outcome == "holds"
    assert Claim("", (Contrast("a", "b"),)).judged(measured).outcome == "not decided"


def test_what_was_trained_once_decides_nothing() -> None:
    measured = {"a": results(20.0, 1, seed=1), "b": results(10.0, 3, seed=2)}
    judged = Claim("", (Contrast("a", "b"),)).judged(measured)
    assert judged.found[0]["low"] > 9 and judged.outcome == "not decided"
    assert Claim("", why="said").judged(measured).outcome == "not measured"
    assert Claim("", why="said", settled="holds").judged(measured).outcome == "holds"


def test_the_best_is_decided_against_the_best_of_the_others() -> None:
    measured = {"a": results(20.0, seed=1), "b": results(19.0, seed=2), "c": results(21.0, seed=3)}
    assert Best("a", ("b", "c")).test(measured).b == "c"
    assert Claim("", (Best("a", ("b", "c")),)).judged(measured).outcome == "does not hold"
    assert Claim("", (Best("c", ("a", "b")),)).judged(measured).outcome == "holds"
    assert Claim("", (Best("a", ("x", "y")),)).judged(measured).outcome == "not measured"


def test_numbers_of_sets_are_compared_by_their_range() -> None:
    assert over_range([3.0, 4.0], [1.0, 2.0], 9) == Interval(mean=2.0, low=1.0, high=3.0, clips=9, missing=0)
    assert math.isnan(over_range([3.0], [1.0, 2.0], 9)["low"])
    a, b = (
        [r for v in values for r in results(20.0, 1, whole={"frechet_codec": v})] for values in ((3.0, 4.0), (1.0, 2.0))
    )
    claim = Claim("", (Contrast("a", "b", "more", "frechet_codec"),))
    assert claim.judged({"a": a, "b": b}).outcome == "holds"
    assert claim.judged({"a": b, "b": a}).outcome == "does not hold"


def test_time_saved_is_of_all_stages() -> None:
    quick = results(20.0, latency={"real stage": [0.9, 1.0, 1.1], "decoding": [0.1, 0.1, 0.1]})
    slow = results(
        20.0, latency={"simulation stage": [0.9, 1.0, 1.0], "real stage": [0.9, 0.9, 1.0], "decoding": [0.1] * 3}
    )
    found = saved(quick, slow)
    assert found["mean"] == pytest.approx(1 - 1.1 / 2.0) and found["low"] <= found["mean"] <= found["high"]
    test = Contrast("a", "b", "same", "latency", margin=0.1, target=0.47)
    assert Claim("", (test,)).judged({"a": quick, "b": slow}).outcome == "holds"
    assert Claim("", (test,)).judged({"a": slow, "b": quick}).outcome == "does not hold"


# -- work -----------------------------------------------------------------------------------------------------------


def chain(count: int) -> list[Unit]:
    """Each needs the one before it, listed last first."""
    task = plan.Calibration()
    names = [f"part/{i}" for i in range(count)]
    return [Unit(task, name, tuple(names[i - 1 : i])) for i, name in enumerate(names)][::-1]


def make(out: Path, order: list[str] | None = None, seconds: float = 0.0) -> Any:
    def do(unit: Unit) -> None:
        time.sleep(seconds)
        (out / unit.file).parent.mkdir(parents=True, exist_ok=True)
        (out / unit.file).write_text("x")
        if order is not None:
            order.append(unit.file)

    return do


def test_units_are_done_once_in_the_order_of_their_needs(tmp_path: Path) -> None:
    order: list[str] = []
    found = chain(4)
    (tmp_path / "part").mkdir()
    (tmp_path / "part/0").write_text("there already")
    assert work(tmp_path, found, make(tmp_path, order)) == 3
    assert order == ["part/1", "part/2", "part/3"]
    assert [row["unit"] for row in spent(tmp_path)] == order and missing(tmp_path, found) == []
    assert work(tmp_path, found, make(tmp_path, order)) == 0 and len(order) == 3
    with (tmp_path / "units.jsonl").open("a") as log:
        log.write('{"unit": "par')  # a line that was being written
    assert len(spent(tmp_path)) == 3


def test_a_unit_that_fails_is_raised_and_not_done(tmp_path: Path) -> None:
    def fail(unit: Unit) -> None:
        raise SimForcingError("no")

    with pytest.raises(SimForcingError, match="no"):
        work(tmp_path, chain(1), fail)
    assert len(missing(tmp_path, chain(1))) == 1
    assert work(tmp_path, chain(1), make(tmp_path)) == 1


def _hold(out: Path, ready: Any) -> None:
    with held(out, chain(1)[0]) as ours:
        ready.put(ours)
        time.sleep(60)


@pytest.mark.skipif(os.name == "nt", reason="no such locks")
def test_what_another_process_holds_is_left_to_it_until_it_is_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Queue()
    other = context.Process(target=_hold, args=(tmp_path, ready))
    other.start()
    assert ready.get(timeout=20) is True
    with held(tmp_path, chain(1)[0]) as ours:
        assert not ours
    assert other.pid is not None
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    with held(tmp_path, chain(1)[0]) as ours:
        assert ours


def test_a_way_says_in_what_it_departs_from_the_papers() -> None:
    assert {plan.PAPER.how, plan.PLAIN.how} == {"branches"}
    assert WAYS["soft"].way.how == "soft"
    assert WAYS["high-noise"].way.how == "branches at noise 0.8 to 1"
    assert WAYS["midpoint"].way.how == "branches, midpoint"
    assert WAYS["midpoint"].way.config.solver == "midpoint" and WAYS["low-noise"].way.guidance.noise == (0.0, 0.8)


# -- time -----------------------------------------------------------------------------------------------------------


def test_equal_time_follows_from_turns(tmp_path: Path) -> None:
    found = {"student": [2.0, 4.0, 9.0], "baseline": [1.0, 2.0, 3.0]}  # the machine slowed down meanwhile
    assert ratio(found) == 2.0
    speed = Speed(ratio=1.5)
    assert speed.equal_time(240) == 360
    assert Speed.load(tmp_path / "none.json") == Speed()
    speed.save(tmp_path / "speed.json")
    assert Speed.load(tmp_path / "speed.json") == speed


def test_the_plan_fits_its_time() -> None:
    sizes, speed = Sizes(), Speed()
    found = minutes(units(sizes), sizes, speed, 2)
    assert found["all"][0] == len(units(sizes))
    assert found["all"][1] == pytest.approx(sum(total for name, (_, total) in found.items() if name != "all"))
    assert 60 < found["all"][1] < 150
    by_task = {str(u): seconds_of(u, sizes, speed) for u in units(sizes)}
    assert by_task["runs/real-only-time-0/model"] > by_task["runs/real-only-0/model"]
    assert by_task["results/pairs/full@soft-0.json"] < by_task["results/pairs/full@teacher-0.json"]
    assert by_task["results/pairs/full@copy-0.json"] < by_task["results/pairs/full@w0-0.json"]


# -- the page -------------------------------------------------------------------------------------------------------


def test_the_page_of_a_study_that_has_just_begun_and_of_one_with_results(tmp_path: Path) -> None:
    sizes = Sizes()
    target = tmp_path / "docs" / "results.md"
    page.write(tmp_path / "out", sizes, target, "simforcing study")
    assert f"{len(units(sizes))} units are missing" in target.read_text()
    for method, mean in (("full", 21.0), ("real-only", 20.0)):
        for seed in range(3):
            task = plan.Measurement(method, "w0.6" if method == "full" else "w0", seed)
            file = tmp_path / "out" / plan.result_file(task)
            file.parent.mkdir(parents=True, exist_ok=True)
            results(mean, 1, seed=seed)[0].save(file)
    page.write(tmp_path / "out", sizes, target, "simforcing study")
    text, stored = target.read_text(), json.loads(target.with_suffix(".json").read_text())
    line = next(line for line in text.splitlines() if "for as many steps" in line)
    assert "**holds**" in line and "25.077" in line and "full@w0.6 - real-only@w0" in line and "+1.0" in line
    assert "not measured" in next(
        line for line in text.splitlines() if "for as much time" not in line and "LIBERO" in line
    )
    first = stored["claims"]["paper"][0]
    assert first["outcome"] == "holds" and first["tests"][0]["difference"]["low"] > 0.5
    assert stored["rows"]["full@w0.6"]["seeds"] == 3
    assert len(stored["rows"]["full@w0.6"]["psnr"]["by_seed"]) == 3
    for row in (line for line in text.splitlines() if line.startswith("| ")):
        assert " nan" not in row


def test_results_of_other_clips_are_not_compared(tmp_path: Path) -> None:
    for seed in range(2):
        file = tmp_path / plan.result_file(plan.Measurement("full", "w0", seed))
        file.parent.mkdir(parents=True, exist_ok=True)
        found = results(20.0, 1)[0].to_dict()
        found["protocol"]["clips_sha256"] = f"clips {seed}"
        file.write_text(json.dumps(found))
    with pytest.raises(SimForcingError, match="clips_sha256"):
        page.write(tmp_path, Sizes(), tmp_path / "results.md", "simforcing study")


# -- what is told of the committed study ----------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs"
TRIPLE = re.compile(r"([+-]?\d+\.\d+)(?: (?:dB|px))? \[([+-]?\d+\.\d+), ([+-]?\d+\.\d+)\]")


def told(text: str) -> set[tuple[float, ...]]:
    """Means with intervals, as written."""
    return {tuple(map(float, found)) for found in TRIPLE.findall(text.replace("−", "-"))}


def part(file: Path, begin: str, end: str) -> str:
    return " ".join(file.read_text().partition(begin)[2].partition(end)[0].split())


@pytest.mark.parametrize(
    ("file", "begin", "end"),
    [(DOCS.parent / "README.md", "## What the study found", "On LIBERO"), (DOCS / "decisions.md", "## 32.", "## 33.")],
    ids=["README", "decision 32"],
)
def test_numbers_told_of_the_study_are_its_own(file: Path, begin: str, end: str) -> None:
    """Also the other way round: what is -0.33 [-0.41, -0.25] for a - b is told as "behind by 0.33 [0.25, 0.41]"."""
    measured = told((DOCS / "results.md").read_text())
    measured |= {(-mean, -high, -low) for mean, low, high in measured}
    found = told(part(file, begin, end))
    assert len(found) >= 3 and found <= measured, found - measured


def test_the_committed_study_is_whole_and_of_the_sizes_that_there_are() -> None:
    stored = json.loads((DOCS / "results.json").read_text())
    assert stored["units_left"] == 0 and stored["sizes"] == json.loads(json.dumps(asdict(Sizes())))
    assert [c["says"] for c in stored["claims"]["ours"]] == [claim.says for claim in ours()]
