"""Result files: what is written is read, and only like is compared with like."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from simforcing.errors import SimForcingError
from simforcing.evaluate.protocol import Protocol, hash_clips
from simforcing.evaluate.results import Comparison, Result

WINDOWS = [(e, s) for e in range(5) for s in (0, 4)]


def result(name: str = "ours", gain: float = 0.0, seed: int = 0, **protocol: object) -> Result:
    rng = np.random.default_rng(1)
    psnr = rng.normal(20, 2, 10) + gain + 0.01 * seed
    moving = psnr - 3
    moving[2] = math.nan
    fields = {
        "split_sha256": "ab", "clips_sha256": hash_clips(WINDOWS), "clips": 10, "frames": 5, "fps": 5.0, "height": 32,
        "width": 32, "sim_steps": 1, "real_steps": 10, "guidance": 0.6, "seed": seed,
    }  # fmt: skip
    return Result(
        name=name,
        model=f"runs/{name}",
        model_sha256=f"{name}-{gain}",
        protocol=Protocol(**{**fields, **protocol}),  # type: ignore[arg-type]
        windows=WINDOWS,
        tasks=["move"] * 10,
        per_clip={"psnr": psnr.tolist(), "psnr_moving": moving.tolist()},
        with_first_frame={"psnr": (psnr + 1).tolist()},
        whole={"fvd": 100.0 - gain},
        unavailable={"lpips_alex": "no weights"},
        by_frame={"psnr": np.tile([22.0, 21.0, 20.0, 19.0], (10, 1)).tolist()},
        action={"true": [1.0] * 10, "exchanged": [2.0] * 10},
        latency={"real stage": [0.2, 0.3, 0.1]},
    )


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    written = result()
    written.save(path)
    read = Result.load(path)
    assert read.protocol == written.protocol and read.windows == WINDOWS
    assert math.isnan(read.per_clip["psnr_moving"][2])
    np.testing.assert_allclose(read.per_clip["psnr"], written.per_clip["psnr"], atol=1e-7)
    plain = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert plain["metrics"]["psnr"]["mean"] == pytest.approx(np.mean(written.per_clip["psnr"]))
    assert plain["metrics"]["fvd"] == {"mean": 100.0, "low": None, "high": None, "clips": 10, "missing": 0}
    assert plain["action_ratio"]["mean"] == 2
    assert plain["metrics"]["psnr_moving"]["missing"] == 1


def test_files_that_are_no_results_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(SimForcingError, match="cannot read the result"):
        Result.load(path)
    path.write_text("{")
    with pytest.raises(SimForcingError, match="no result file"):
        Result.load(path)
    path.write_text('{"format": "other"}')
    with pytest.raises(SimForcingError, match="no result file of this version"):
        Result.load(path)
    result().save(path)
    damaged = json.loads(path.read_text())
    del damaged["windows"]
    path.write_text(json.dumps(damaged))
    with pytest.raises(SimForcingError, match="a damaged result file"):
        Result.load(path)


def test_methods_may_differ_in_how_they_are_sampled() -> None:
    found = Comparison.of([result("ours", 1.0), result("plain", guidance=0.0, sim_steps=None)])
    (first, second) = found.differences("ours", ("psnr", "psnr_moving"))
    assert first["mean"] == pytest.approx(1.0) and first["low"] == pytest.approx(1.0)
    assert first["p"] == 2 / 2**5  # five episodes
    assert second["clips"] == 9 and second["missing"] == 1
    rows = found.rows()
    assert rows["ours"]["fvd"]["mean"] == 99 and math.isnan(rows["ours"]["fvd"]["low"])
    assert found.action_ratios()["plain"]["mean"] == 2
    assert [v["mean"] for v in found.frames("ours", "psnr") or []] == [22, 21, 20, 19]
    assert found.frames("ours", "colour_drift") is None
    assert found.unavailable() == {"lpips_alex": "no weights"} and found.notes == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("split_sha256", "cd"), ("frames", 9), ("seed", 4), ("code", "2.0"), ("metrics", {"psnr": "another"}),
     ("first_frame", True), ("networks", {"i3d": "ff"})],
)  # fmt: skip
def test_other_protocols_are_refused_unless_asked_and_then_it_is_said(field: str, value: object) -> None:
    results = [result("ours"), dataclasses.replace(result("other"), protocol=result("x", **{field: value}).protocol)]
    with pytest.raises(SimForcingError, match=f"'ours' and 'other' differ in '{field}"):
        Comparison.of(results)
    (note,) = Comparison.of(results, {field}).notes
    assert "not measured alike" in note and field in note


def test_results_of_one_name_are_seeds_of_one_method() -> None:
    found = Comparison.of([result("ours", seed=0), result("ours", seed=1), result("other", seed=0)])
    table = found.table("ours", "psnr")
    assert table is not None and table.shape == (2, 10)
    assert found.rows()["ours"]["psnr"]["mean"] == pytest.approx(table.mean())
    with pytest.raises(SimForcingError, match="two results named 'ours' are of the same model and seed"):
        Comparison.of([result("ours"), result("ours")])
    with pytest.raises(SimForcingError, match=r"'guidance': 0\.6 against 1\.0"):
        Comparison.of([result("ours"), result("ours", 1.0, guidance=1.0)])
    with pytest.raises(SimForcingError, match="no results to compare"):
        Comparison.of([])


def test_seeds_that_differ_widen_every_interval() -> None:
    """Of two trainings, one follows its actions and one hardly does: 9 and 2 times the error, whatever the clip."""
    keen, dull = result("ours", seed=0), result("ours", seed=1)
    keen = dataclasses.replace(keen, action={"true": [1.0] * 10, "exchanged": [9.0] * 10})
    dull = dataclasses.replace(
        dull,
        by_frame={"psnr": np.tile([12.0, 11.0, 10.0, 9.0], (10, 1)).tolist()},
        with_first_frame={"psnr": [50.0] * 10},
    )
    found = Comparison.of([keen, dull])
    ratio = found.action_ratios()["ours"]
    assert (ratio["mean"], ratio["low"], ratio["high"]) == (5.5, 2.0, 9.0)
    first = (found.frames("ours", "psnr") or [])[0]
    assert (first["mean"], first["low"], first["high"]) == (17.0, 12.0, 22.0)
    given = found.rows_with_first_frame()["ours"]["psnr"]
    assert given["mean"] == pytest.approx(np.mean([*keen.with_first_frame["psnr"], *[50.0] * 10]))
    assert given["high"] > 49 and set(found.rows_with_first_frame()["ours"]) == {"psnr"}


def test_seeds_that_were_not_measured_alike_are_said() -> None:
    found = Comparison.of([result("ours", seed=0, code="1"), result("ours", seed=1, code="2")], {"code"})
    (note,) = found.notes
    assert "not measured alike" in note and "code" in note
