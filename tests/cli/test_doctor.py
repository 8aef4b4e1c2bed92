"""`simforcing doctor --memory`: the table, JSON and bad input."""

import json

import pytest

from simforcing.cli import doctor
from simforcing.cli.main import main

Capture = pytest.CaptureFixture[str]


def test_memory_of_a_recipe_as_a_table(capsys: Capture) -> None:
    assert main(["doctor", "--memory", "small", "--gpus", "2", "--gpu-gib", "8"]) == 0
    shown = capsys.readouterr().out
    first, *lines = shown.splitlines()
    assert first == "small on 2 GPUs: memory per GPU in GiB, computed from the configuration, not measured."
    table = [line.split() for line in lines if line.startswith(("teacher ", "student ", "baseline ", "inference "))]
    assert [row[0] for row in table] == ["teacher"] * 4 + ["student"] * 4 + ["baseline"] * 4 + ["inference"]
    for row in table[:-1]:
        numbers = [0.0 if cell == "-" else float(cell) for cell in row[-8:-1]]
        assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.04)
    assert max(map(len, shown.splitlines())) <= 130
    assert "  student: fits with DDP, activation checkpointing" in lines
    assert "  teacher: fits" in shown and "On a GPU of 8 GiB" in shown


def test_memory_as_json(capsys: Capture) -> None:
    assert main(["doctor", "--memory", "small", "--json", "--windows", "5", "--batch-size", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"] == "small" and found["gpus"] == 1 and "not measured" in found["computed"]
    assert found["parameters"]["video expert"] == 118_942_624
    assert [row["stage"] for row in found["stages"][::2]] == ["teacher", "student", "baseline", "inference"]
    for row in found["stages"]:
        parts = ("weights", "gradients", "optimiser", "copies", "teacher", "activations")
        assert row["total"] == sum(row[part] for part in parts)
        assert row["fits"] is True
    assert found["stages"][0]["clips"] == 4
    assert found["disk"]["latents of 5 windows"] == 5 * 2 * (40 * 6 * 16 * 20) * 2
    assert found["encoding"]["codec weights"] == 4 * found["parameters"]["codec"]


def test_what_does_not_fit_is_said(capsys: Capture) -> None:
    assert main(["doctor", "--memory", "small", "--gpu-gib", "2.5"]) == 0
    assert "  student: does not fit in any of these ways" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--memory", "smal"], "no recipe 'smal'; did you mean 'small'?"),
        (["--memory", "demo", "--gpus", "0"], "0 GPUs: memory is computed for at least 1"),
        (["--memory", "demo", "--batch-size", "0"], "batch size 0: a step needs at least one clip"),
        (["--memory", "demo", "--windows", "0"], "--windows 0, --gpu-gib 80: both must be above zero"),
        (["--memory", "demo", "--gpu-gib", "nan"], "--windows 1000, --gpu-gib nan: both must be above zero"),
        (["--memory", "demo", "--lora", "0"], "rank 0 of adapters: give at least 1"),
        (["--json"], "--json goes with --memory RECIPE"),
    ],
)
def test_bad_input_is_one_line(options: list[str], said: str, capsys: Capture) -> None:
    assert main(["doctor", *options]) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


def test_checks_are_not_run_with_memory(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(doctor.Doctor, "checks", lambda self: pytest.fail("checks ran"))
    assert main(["doctor", "--memory", "demo"]) == 0
    assert "demo on 1 GPU:" in capsys.readouterr().out
