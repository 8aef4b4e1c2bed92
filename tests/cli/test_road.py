"""The road on real Franka episodes, by the commands that a user types, and what bad input says."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from simforcing.cli.main import main
from simforcing.data import open_dataset
from simforcing.data.episode import REAL, SIM
from simforcing.data.video import VideoFile
from simforcing.data.windows import save_split


def run(*words: str | Path) -> int:
    return main([str(w) for w in words])


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one line that a refused command prints."""
    capsys.readouterr()
    assert run(*words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.fixture(scope="module")
def franka(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs and latents of three real episodes."""
    root = tmp_path_factory.mktemp("franka")
    robot = shared / "robots" / "panda" / "panda.urdf"
    assert (
        run("twin", "pair", shared / "data" / "lerobot_v30", root / "pairs", "--robot", robot, "--qa-episodes", "0")
        == 0
    )
    assert run("encode", root / "pairs", root / "latents", "--recipe", "tiny", "--val", "1") == 0
    return root


def test_real_episodes_from_pairs_to_a_predicted_clip(franka: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = open_dataset(franka / "pairs")
    assert [pairs[i].length for i in range(len(pairs))] == [33, 72, 89]
    real, sim = (pairs[0].frames(key, [0, 32]) for key in (REAL, SIM))
    assert real.shape == sim.shape == (2, 192, 320, 3)
    assert np.abs(sim[0].astype(int) - sim[1]).max() > 60  # the simulated arm has moved

    common = ("--data", franka / "latents", "--recipe", "tiny", "--batch-size", "4", "--threads", "1")
    assert run("train", "teacher", "--out", franka / "teacher", "--steps", "12", *common) == 0
    teacher = franka / "teacher" / "model"
    assert run("train", "student", "--out", franka / "student", "--teacher", teacher, "--steps", "8", *common) == 0
    assert run("train", "baseline", "--out", franka / "baseline", "--teacher", teacher, "--steps", "2", *common) == 0
    rows = [json.loads(line) for line in (franka / "student" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 8
    assert np.isfinite(rows[-1]["val_flow_0.6"])

    out = franka / "clip.mp4"
    student = franka / "student" / "model"
    assert (
        run("predict", student, "--data", franka / "pairs", "--episode", "1", "0", "-o", out, "--real-steps", "2") == 0
    )
    video = VideoFile(out, 5.0)
    frames = video.at([i / 5.0 for i in range(13)])
    assert frames.shape[0] == 13
    assert frames.shape[2] > frames.shape[1]  # truth, prediction, simulation beside each other
    assert out.with_suffix(".png").stat().st_size > 10_000
    assert "PSNR of predicted frames" in capsys.readouterr().out

    numbers = franka / "numbers.json"
    split = franka / "latents" / "split.json"
    assert run("evaluate", student, "--data", franka / "pairs", "--split", split, "--part", "val", "--out", numbers,
               "--real-steps", "2", "--per-episode", "2") == 0  # fmt: skip
    found = json.loads(numbers.read_text())
    assert found["protocol"]["frames"] == 13
    assert 5 < found["metrics"]["psnr"]["mean"] < 40

    began = json.loads((franka / "student" / "run.json").read_text())["start"]
    assert began == hashlib.sha256((teacher / "model.safetensors").read_bytes()).hexdigest()[:16]
    assert json.loads((franka / "teacher" / "run.json").read_text())["start"] == "scratch"
    assert {"val_flow_real_on", "val_flow_sim", "val_action_ratio"} <= rows[-1].keys()
    _refuse_what_does_not_belong_together(franka, student, capsys)


def _refuse_what_does_not_belong_together(franka: Path, student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs, split, out = franka / "pairs", franka / "latents" / "split.json", franka / "other.json"
    given = ("evaluate", student, "--data", pairs, "--out")
    assert "no episodes in 'test'; use --part val" in refused(capsys, *given, out, "--split", split)
    assert "no directory" in refused(capsys, *given, franka / "none" / "n.json", "--split", split)
    save_split(franka / "far.json", {"val": [7]})
    assert "names episode 7" in refused(capsys, *given, out, "--split", franka / "far.json", "--part", "val")
    save_split(franka / "other-split.json", {"val": [1]}, "0" * 64)
    other = refused(capsys, *given, out, "--split", franka / "other-split.json", "--part", "val")
    assert "divides another dataset" in other
    predict = ("predict", student, "--data", pairs, "-o")
    assert "clip.png exists" in refused(capsys, *predict, franka / "clip.png")
    (franka / "strip.png").touch()
    assert "strip.png exists" in refused(capsys, *predict, franka / "strip.mp4")
    assert "actions mean something else: " in refused(
        capsys, "predict", "bundled-student", "--data", pairs, "-o", franka / "x.mp4"
    )
    assert not out.exists()


def test_bad_input_is_one_line_and_code_2(
    franka: Path, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    panda = shared / "robots" / "panda" / "panda.urdf"
    data = shared / "data" / "lerobot_v30"
    assert "no such" in refused(capsys, "twin", "pair", tmp_path / "none", tmp_path / "out", "--robot", panda)
    wrong = tmp_path / "robot.urdf"
    wrong.write_text("<robot")
    assert "robot.urdf" in refused(capsys, "twin", "pair", data, tmp_path / "out", "--robot", wrong)
    assert "widowx250s" in refused(capsys, "twin", "pair", data, tmp_path / "out", "--robot", "widowx")
    far = refused(
        capsys, "twin", "pair", data, tmp_path / "out", "--robot", panda, "--tool-offset", "2", "0", "0", "0", "0", "0"
    )
    assert "episode" in far and "cm" in far
    assert not (tmp_path / "out").exists()
    assert "did you mean 'tiny'" in refused(capsys, "encode", franka / "pairs", tmp_path / "l", "--recipe", "tinny")
    assert "encode" in refused(capsys, "train", "teacher", "--data", tmp_path, "--out", tmp_path / "t")
    assert "needs --teacher" in refused(
        capsys, "train", "student", "--data", franka / "latents", "--out", tmp_path / "s"
    )
    assert "is not in the cache" in refused(
        capsys, "train", "teacher", "--data", franka / "latents", "--out", tmp_path / "t", "--steps", "1"
    )  # the recipe 'demo' reads MiniLM embeddings, which do not hold these instructions
    assert not (tmp_path / "t").exists()
    teacher = ("train", "teacher", "--data", franka / "latents", "--recipe", "tiny", "--out", tmp_path / "t")
    assert "batch size 0" in refused(capsys, *teacher, "--batch-size", "0")
    assert "learning rate 0" in refused(capsys, *teacher, "--lr", "0")
    assert "every is 0" in refused(
        capsys, "encode", franka / "pairs", tmp_path / "l", "--recipe", "tiny", "--every", "0"
    )
    assert "exists" in refused(capsys, "predict", tmp_path, "--data", franka / "pairs", "-o", panda)


def test_another_configuration_is_refused_and_nothing_is_lost(
    franka: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (
        "--data",
        franka / "latents",
        "--recipe",
        "tiny",
        "--out",
        tmp_path / "t",
        "--threads",
        "1",
        "--steps",
        "2",
    )
    assert run("train", "teacher", *common, "--batch-size", "2") == 0
    before = {p: p.read_bytes() for p in (tmp_path / "t").rglob("*") if p.is_file()}
    assert "batch_size: 2 there, 3 now" in refused(capsys, "train", "teacher", *common, "--batch-size", "3")
    assert {p: p.read_bytes() for p in (tmp_path / "t").rglob("*") if p.is_file()} == before
    assert run("train", "teacher", *common, "--batch-size", "2") == 0  # the same again has nothing to do
    assert "not empty and not a training run" in refused(
        capsys,
        "train",
        "teacher",
        "--data",
        franka / "latents",
        "--recipe",
        "tiny",
        "--out",
        franka / "pairs",
        "--steps",
        "2",
    )
    assert "another" in refused(
        capsys, "encode", franka / "pairs", franka / "latents", "--recipe", "tiny", "--every", "5"
    )
