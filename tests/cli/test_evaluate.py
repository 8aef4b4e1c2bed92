"""`simforcing evaluate` on the student that ships: numbers, controls, what is missing, what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from simforcing.cli.main import main
from simforcing.evaluate.gallery import load_video
from simforcing.evaluate.results import Result

FEW = ("--real-steps", "1", "--no-download", "--part", "val")


def evaluate(pairs, out: Path, *more: str) -> int:
    given = ["bundled-student", "--data", str(pairs.data), "--split", str(pairs.split), "--out", str(out)]
    return main(["evaluate", *given, *FEW, *more])


def test_numbers_videos_and_protocol(held_out_pairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ours.json"
    assert evaluate(held_out_pairs, out, "--networks", str(tmp_path)) == 0
    found = Result.load(out)
    assert found.name == "ours" and len(found.model_sha256) == 64
    assert {"psnr", "psnr_moving", "ssim", "temporal_error", "flicker", "colour_drift", "arm_track"} <= set(
        found.per_clip
    )
    assert 10 < np.mean(found.per_clip["psnr"]) < 40
    assert set(found.with_first_frame) == {"psnr", "ssim"}
    assert np.mean(found.with_first_frame["psnr"]) > np.mean(found.per_clip["psnr"])
    assert set(found.unavailable) == {"lpips_alex", "lpips_vgg", "fid", "fvd", "frechet_codec"}
    assert set(found.sensitivity) == {"zero", "negated", "shuffled", "other"}
    assert np.mean(found.action["exchanged"]) > 1.1 * np.mean(found.action["true"])  # it follows its actions
    assert list(found.latency) == ["simulation stage", "real stage", "decoding"]
    assert all(len(s) == 3 and min(s) > 0 for s in found.latency.values())
    assert np.array(found.by_frame["psnr"]).shape == (2, 12)
    p = found.protocol
    assert (p.clips, p.frames, p.height, p.guidance, p.sim_steps, p.real_steps) == (2, 13, 64, 0.6, 1, 1)
    assert p.simulation == "predicted" and p.networks == {} and "fvd" not in p.metrics and "arm_track" in p.metrics
    shown = capsys.readouterr().out
    assert "LPIPS (AlexNet): unavailable (no alexnet-owt-7be5be79.pth" in shown and "Action ratio: " in shown

    folder = tmp_path / str(found.videos)
    assert len(list(folder.iterdir())) == 2 * 4
    predicted = load_video(folder, found.windows[0], "predicted", 13, p.fps)
    real = load_video(folder, found.windows[0], "real", 13, p.fps)
    assert predicted is not None and real is not None and predicted.shape == (13, 64, 64, 3)
    again = -10 * np.log10(np.mean((predicted[1:].astype(float) - real[1:]) ** 2) / 255**2)
    assert again == pytest.approx(found.per_clip["psnr"][0], abs=0.3)  # the kept videos are those that were scored


def test_without_guidance_nothing_is_simulated(held_out_pairs, tmp_path: Path) -> None:
    out = tmp_path / "plain.json"
    plain = ("-w", "0", "--no-sensitivity", "--no-videos", "--name", "w = 0", "--solver", "midpoint")
    assert evaluate(held_out_pairs, out, *plain, "--guided-noise", "0", "0.8") == 0
    found = Result.load(out)
    assert (found.name, found.videos, found.protocol.sim_steps, found.protocol.simulation) == ("w = 0", None, None, "")
    assert found.protocol.guidance_kind == "branches at noise 0 to 0.8, midpoint"
    assert list(found.latency) == ["real stage", "decoding"] and set(found.sensitivity) == {"other"}
    assert [f.name for f in tmp_path.iterdir()] == ["plain.json"]


def test_a_model_without_simulation_needs_w_0(
    held_out_pairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = ("--data", str(held_out_pairs.data), "--split", str(held_out_pairs.split))
    words = ("evaluate", "bundled-teacher", *pairs, "--out", str(tmp_path / "t.json"), *FEW, "--no-videos")
    assert main([*words]) == 2
    assert "this model sees no simulation, so it has no guidance weight; use -w 0" in capsys.readouterr().err
    assert main([*words, "-w", "0", "--no-sensitivity"]) == 0
    assert Result.load(tmp_path / "t.json").protocol.guidance == 0.0
    start = ("predict", "bundled-teacher", *pairs[:2], "--episode", "0", "-o", str(tmp_path / "t.mp4"))
    assert main([*start]) == 2 and "use -w 0" in capsys.readouterr().err
    long = [*start, "-w", "0", "--real-steps", "1"]
    assert main([*long, "--windows", "9"]) == 2
    assert "9 windows from row 0 need 109 rows, it has 33; --windows 2 fits" in capsys.readouterr().err
    assert main([*long, "--windows", "2"]) == 0


slow = pytest.mark.slow
CONTROLS = ["copy", "codec", "other-simulation"]
CONTROLS += [pytest.param(name, marks=slow) for name in ("exchanged-actions", "corrupted-simulation")]


@pytest.mark.parametrize("control", CONTROLS)
def test_controls(control: str, held_out_pairs, tmp_path: Path) -> None:
    out = tmp_path / "control.json"
    more = ("--control", control, "--no-videos", "--simulation", "rendered")
    assert evaluate(held_out_pairs, out, *more) == 0
    stored = json.loads(out.read_text())
    found = Result.load(out)
    assert found.protocol.control == control and found.sensitivity == {} and stored["action_ratio"] is None
    if control in ("copy", "codec"):
        assert found.protocol.guidance is None and found.latency == {}
    if control == "copy":
        np.testing.assert_allclose(found.per_clip["temporal_error"], 1)
    if control == "codec":
        assert min(found.per_clip["psnr"]) > 22


def test_bad_input_is_refused_before_anything_is_computed(
    held_out_pairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*more: str) -> str:
        assert evaluate(held_out_pairs, tmp_path / "x.json", *more) == 2
        return capsys.readouterr().err

    assert "give NAME=FILE" in refused("--network", "i3d")
    assert "there is no file" in refused("--network", f"i3d={tmp_path}/none.pt")
    assert "--networks: there is no folder" in refused("--networks", f"{tmp_path}/none")
    (tmp_path / "x.videos").mkdir()
    assert "x.videos exists" in refused()
    assert not (tmp_path / "x.json").exists()
