"""Numbers on the command line that no computation could use: one line, exit code 2."""

import pytest

from simforcing.cli.main import main

SAMPLE = ("bundled-student", "--data", "d", "-o", "x.mp4")
SCORE = ("bundled-student", "--data", "d", "--split", "s", "--out", "x.json")


@pytest.mark.parametrize("seed", ["-1", str(2**63)])
@pytest.mark.parametrize(
    "words",
    [
        ("predict", *SAMPLE, "--seed"),
        ("evaluate", *SCORE, "--seed"),
        ("encode", "d", "o", "--seed"),
        ("sweep", "steps", *SCORE, "--seeds"),
        ("twin", "calibrate", "d", "--robot", "panda", "--seed"),
        ("twin", "augment", "d", "o", "--per-episode", "1", "--seed"),
        ("demo", "--seed"),
        ("import", "w.pt", "o", "--seed"),
        ("policy", "demos", "--suite", "libero_object", "--episodes", "1", "--rate", "--seed"),
        ("policy", "train", "d", "--out", "o", "--split-seed"),
        ("policy", "eval", "m", "--suite", "libero_object", "--out", "o", "--seed"),
        ("policy", "serve", "m", "--seed"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_seeds(words: tuple[str, ...], seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, seed]) == 2
    errors = capsys.readouterr().err
    assert f"{words[-1]} {seed}: give a whole number" in errors and errors.count("\n") == 1


@pytest.mark.parametrize("w", ["nan", "inf"])
def test_weights(w: str, capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["predict", *SAMPLE, "-w", w]) == 2
    assert f"guidance w is {w}" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("predict", *SAMPLE), ("evaluate", *SCORE)], ids=["predict", "evaluate"])
def test_noise_ranges(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--guided-noise", "0.8", "0.2"]) == 2
    assert "guidance at noise (0.8, 0.2): give two levels" in capsys.readouterr().err


def test_an_empty_directory_name_is_not_this_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "audit", ""]) == 2
    assert "empty text" in capsys.readouterr().err
