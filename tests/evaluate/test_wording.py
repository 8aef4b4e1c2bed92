import dataclasses
import math

import pytest

from simforcing.evaluate.report import wording as v

NAN = math.nan
NOT = "student does NOT beat baseline:"


def difference(mean, low, high, metric="psnr", a="student", b="baseline"):
    return {
        "name": "",
        "metric": metric,
        "a": a,
        "b": b,
        "mean": mean,
        "low": low,
        "high": high,
        "clips": 9,
        "missing": 0,
    }


@pytest.mark.parametrize(
    ("numbers", "outcome", "text"),
    [
        ((0.42, 0.3, 0.55), "yes", "student beats baseline by +0.42 dB [0.30, 0.55] (PSNR)"),
        ((-0.42, -0.55, -0.3), "no", "student is WORSE than baseline by −0.42 dB [−0.55, −0.30] (PSNR)"),
        ((0.05, -0.1, 0.2), "open", f"{NOT} +0.05 dB [−0.10, 0.20] (PSNR); the interval includes zero"),
        ((0.5, 0.0, 1.0), "open", f"{NOT} +0.50 dB [0.00, 1.00] (PSNR); the interval includes zero"),
        ((0.5, NAN, NAN), "open", "student against baseline: too few clips to tell: +0.50 dB (PSNR)"),
    ],
)  # fmt: skip
def test_the_interval_decides(numbers, outcome, text):
    verdict = v.verdict(difference(*numbers))
    assert (verdict.outcome, str(verdict)) == (outcome, text)


def test_more_sharpness_is_no_win():
    assert v.verdict(difference(0.2, 0.1, 0.3, "sharpness")).outcome == "neutral"
    assert "is less sharp than" in str(v.verdict(difference(-0.2, -0.3, -0.1, "sharpness")))


def test_where_less_is_better_the_smaller_one_wins(monkeypatch):
    less = dataclasses.replace(v.METRICS["psnr"], better=-1)
    monkeypatch.setitem(v.METRICS, "psnr", less)
    assert v.verdict(difference(-0.2, -0.3, -0.1)).outcome == "yes"
    assert v.verdict(difference(0.2, 0.1, 0.3)).outcome == "no"


def test_metrics_of_one_pair_are_gathered_under_the_first():
    found = v.compare(
        [
            difference(0.4, 0.3, 0.5, "psnr_moving"),
            difference(0.4, 0.3, 0.5, "psnr_moving", b="copy"),
            difference(-0.01, -0.02, -0.005, "ssim"),
        ]
    )
    assert [c.headline.claim for c in found] == ["student beats baseline by", "student beats copy by"]
    assert found[0].others == [("no", "SSIM −0.010 [−0.020, −0.005]")]
    assert found[1].others == []


@pytest.mark.parametrize(
    ("numbers", "outcome"),
    [
        ((2.1, 1.9, 2.3), "yes"),
        ((1.15, 1.1, 1.2), "open"),
        ((1.05, 0.98, 1.1), "no"),
        ((1.3, 0.9, 1.7), "open"),
        ((1.0, math.nan, math.nan), "open"),
    ],
)
def test_a_model_must_show_that_it_uses_its_actions(numbers, outcome):
    interval = dict(zip(("mean", "low", "high"), numbers, strict=True), clips=5, missing=0)
    assert v.action_verdict("teacher", interval).outcome == outcome


def test_numbers_have_sensible_digits():
    assert v.number(-0.004, 2) == "0.00"
    assert v.number(-1.5, 1) == "−1.5"
    assert v.number(math.nan, 2) == "–"
    assert [v.seconds(s) for s in (0.01234, 0.412, 16.92, 123.4, 4321.0, 0.0)] == [
        "0.0123",
        "0.412",
        "16.9",
        "123",
        "4321",
        "0",
    ]
