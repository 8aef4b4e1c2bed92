"""`simforcing train` on a cache of random latents: options, resuming, stopping, several processes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from simforcing.cli.main import main
from simforcing.data.cache import write_cache
from simforcing.data.episode import ActionConvention
from simforcing.data.windows import save_split
from simforcing.evaluate.protocol import code_version, describe_machine
from simforcing.model.codec import load_codec
from simforcing.model.world_model import WorldModel
from simforcing.recipes import recipe

FOUND = recipe("tiny")
QUICK = ("--recipe", "tiny", "--batch-size", "2", "--threads", "1", "--device", "cpu")


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
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four episodes of two clips."""
    out, rng, codec = tmp_path_factory.mktemp("train") / "latents", np.random.default_rng(0), load_codec(FOUND.codec)
    shape = codec.latent_shape(FOUND.rule.frames, FOUND.rule.height, FOUND.rule.width)
    arrays: dict[str, np.ndarray] = {
        "action": rng.uniform(-1, 1, (8, FOUND.rule.actions, 7)).astype(np.float32),
        "proprio": rng.uniform(-1, 1, (8, 7)).astype(np.float32),
        "episode": np.repeat(np.arange(4, dtype=np.int32), 2),
        "start": np.tile(np.arange(2, dtype=np.int32), 4),
        "task": np.zeros(8, np.int32),
        "real": rng.standard_normal((8, *shape)).astype(np.float16),
        "sim": rng.standard_normal((8, *shape)).astype(np.float16),
    }
    header = {
        "codec": codec.identity, "rule": asdict(FOUND.rule), "domains": ["real", "sim"], "tasks": ["lift the lid"],
        "action": ActionConvention().to_dict(), "source": "0" * 64, "every": 1,
    }  # fmt: skip
    write_cache(out, header, [arrays])
    save_split(out / "split.json", {"train": [0, 1, 2], "val": [3]})
    return out


@pytest.fixture(scope="module")
def teacher(latents: Path) -> Path:
    out = latents.parent / "teacher"
    assert run("train", "teacher", "--data", latents, "--out", out, "--steps", "2", *QUICK) == 0
    return out / "model"


def rows(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_a_student_with_overrides_rollouts_and_the_best_weights(
    latents: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "student"
    words = (
        "train", "student", "--data", latents, "--teacher", teacher, "--out", out, "--steps", "4", *QUICK,
        "--set", "objective.motion_weight=0.25", "objective.motion_target=value", "training.rollout_every=2",
    )  # fmt: skip
    assert run(*words) == 0
    assert f"{out / 'model'}: student after 4 steps" in capsys.readouterr().out
    described = json.loads((out / "run.json").read_text())
    assert described["objective"]["motion_weight"] == 0.25
    assert described["objective"]["motion_target"] == "value"
    assert described["precision"] == "float32"
    assert [row["step"] for row in rows(out) if "rollout_psnr" in row] == [2, 4]
    watched = next(row for row in rows(out) if "rollout_psnr" in row)
    assert 3 < watched["rollout_psnr"] < 60 and -1 < watched["rollout_ssim"] < 1
    names = [f"step-{step:08d}{end}" for step in (2, 4) for end in (".mp4", ".png")]
    assert sorted(p.name for p in (out / "rollouts").iterdir()) == names
    before = (out / "model" / "model.safetensors").read_bytes()
    assert run(*words, "--result", "best") == 0  # the run has ended, so only its weights are written
    assert "model-best: student after 4 steps" in capsys.readouterr().out
    assert (out / "model-best" / "model.safetensors").read_bytes() == before
    (made_by,) = (json.loads(line) for line in (out / "environment.jsonl").read_text().splitlines())
    assert made_by == {"code": code_version(), **describe_machine()}
    (out / "environment.jsonl").write_text(json.dumps({**made_by, "cpu": "another"}) + "\n")
    assert run(*words) == 0
    assert [json.loads(line)["cpu"] for line in (out / "environment.jsonl").read_text().splitlines()] == [
        "another",
        made_by["cpu"],
    ]
    other = (*words[:-3], "objective.motion_weight=0.5", *words[-2:])
    assert "objective.motion_weight: 0.25 there, 0.5 now" in refused(capsys, *other)
    assert "did you mean 'motion_weight'?" in refused(capsys, *words, "--set", "objective.motion_wait=1")


def test_other_data_are_refused(
    latents: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "baseline", "--data", latents, "--out", tmp_path / "run", "--steps", "1", *QUICK)
    assert run(*words) == 0
    split = (latents / "split.json").read_text()
    try:
        save_split(latents / "split.json", {"train": [0, 1], "val": [3]})
        assert "split.train: [0, 1, 2] there, [0, 1] now" in refused(capsys, *words)
    finally:
        (latents / "split.json").write_text(split)


def test_adapters_give_a_plain_model(latents: Path, teacher: Path, tmp_path: Path) -> None:
    out = tmp_path / "lora"
    words = ("train", "student", "--data", latents, "--teacher", teacher, "--out", out, "--steps", "2", "--lora", "2")
    assert run(*words, *QUICK) == 0
    assert {row["step"] for row in rows(out)} == {2}
    made, start = WorldModel.from_pretrained(out / "model"), WorldModel.from_pretrained(teacher)
    assert made.sim is not None
    assert made.video.layers[0].attn1.to_q.weight.ne(start.video.layers[0].attn1.to_q.weight).any()
    assert made.video.proj_out.weight.eq(start.video.proj_out.weight).all()


def test_options_that_do_not_fit_are_refused(latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train", "baseline", "--data", latents, "--out", tmp_path / "run", "--steps", "1", *QUICK)
    assert "--lora adapts a model" in refused(capsys, *words, "--lora", "2")
    assert "accumulate 0" in refused(capsys, *words, "--accumulate", "0")
    assert not (tmp_path / "run").exists()


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "simforcing.cli.main", *(str(w) for w in words)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigterm_saves_says_so_and_the_same_command_goes_on(latents: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = command(
        "train", "baseline", "--data", latents, "--out", out, "--steps", "60", *QUICK, "--set", "training.log_every=1"
    )
    first = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    while not (out / "log.jsonl").exists() and first.poll() is None:
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 143
    assert "and saved; the same command goes on from there" in errors
    (saved,) = (out / "checkpoints").iterdir()
    stopped = int(saved.name.removeprefix("step-"))
    assert 1 <= stopped < 60
    assert subprocess.run(words, timeout=200, check=False).returncode == 0
    assert [row["step"] for row in rows(out) if "total" in row] == list(range(1, 61))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_torchrun_trains_as_one_process_does(latents: Path, teacher: Path, tmp_path: Path, parallel: str) -> None:
    common = (
        "train", "student", "--data", latents, "--teacher", teacher, "--steps", "4", "--recipe", "tiny", "--threads",
        "1", "--set", "objective.syn_share=1", "training.rollout_every=4", "training.log_every=1",
    )  # fmt: skip
    assert run(*common, "--out", tmp_path / "one", "--batch-size", "4") == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words = [*torchrun, *command(*common, "--out", tmp_path / "two", "--batch-size", "2", "--parallel", parallel)[2:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, timeout=500, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("student after 4 steps") == 1
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    keys = ("total", "val_flow", "rollout_psnr")
    for key, tolerance in zip(keys, (1e-5, 1e-4, 0.05), strict=True):
        a, b = ([row[key] for row in log if key in row] for log in (one, two))
        assert a == pytest.approx(b, abs=tolerance), key
        assert a, key
    assert (tmp_path / "two" / "rollouts" / "step-00000004.mp4").exists()
    wrong = subprocess.run(
        [*words, "--seed", "5"], timeout=300, capture_output=True, text=True, env=environment, check=False
    )
    assert wrong.returncode != 0
    assert wrong.stderr.count("error: ") == 1
    assert "seed: 0 there, 5 now" in wrong.stderr
