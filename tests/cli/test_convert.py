"""`import` and `export` as typed: exit codes, one line of error, what is written and what is said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from simforcing.cli.main import main
from simforcing.model.codec import TinyCodec, TinyCodecConfig
from simforcing.model.experts import ExpertConfig
from simforcing.model.released import PARTS, released_name
from simforcing.model.umt5 import cache_path
from simforcing.model.world_model import WorldModel, WorldModelConfig

EXPERT = ExpertConfig(dim=16, ffn_dim=24, num_layers=1, num_heads=2, head_dim=12, text_dim=8, freq_dim=8)
Said = Callable[[], tuple[str, str]]


def student(path: Path, change: Callable[[dict[str, Any]], object] = lambda kept: None) -> Path:
    """A released checkpoint in bfloat16."""
    torch.manual_seed(0)
    model = WorldModel(WorldModelConfig(video=EXPERT, action=EXPERT, channels=4, action_dim=3, proprio_dim=2))
    flat: dict[str, Tensor] = {released_name(k): v.bfloat16() for k, v in model.state_dict().items()}
    kept: dict[str, Any] = {
        part: {k.removeprefix(f"{part}."): v for k, v in flat.items() if k.startswith(f"{part}.")} for part in PARTS
    }
    kept |= {"step": 42, "torch_dtype": "torch.bfloat16"}
    change(kept)
    torch.save(kept, path)
    return path


def wan(root: Path) -> Path:
    """The transformer of a release in diffusers' layout."""
    from diffusers import WanTransformer3DModel

    WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=8,
        ffn_dim=16, num_layers=1,
    ).save_pretrained(root / "transformer")  # fmt: skip
    return root


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Standard output, and the last line of standard error."""

    def read() -> tuple[str, str]:
        out, err = capsys.readouterr()
        return out.strip(), err.strip().rpartition("\n")[2]

    return read


def test_a_released_file_comes_in_and_goes_out_bit_by_bit(tmp_path: Path, said: Said) -> None:
    path = student(tmp_path / "any-name.bin", lambda kept: kept.update(optimizer={"state": {}}))
    assert main(["import", str(path), str(tmp_path / "model"), "--heads", "2"]) == 0
    out, _ = said()
    assert "released student of step 42" in out and "parameters in bfloat16; left out: optimizer" in out
    assert "it takes latents only" in out
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "back.pt")]) == 0
    before, after = (torch.load(p, weights_only=True) for p in (path, tmp_path / "back.pt"))
    assert after["step"] == 42 and after.keys() == before.keys() - {"optimizer"}
    for part in PARTS:
        assert all(torch.equal(after[part][key], value) for key, value in before[part].items())
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "wide.pt"), "--dtype", "float32"]) == 0
    assert "float32" in said()[0]
    assert torch.load(tmp_path / "wide.pt", weights_only=True)["torch_dtype"] == "torch.float32"


def test_with_its_preparation_an_imported_model_predicts(tmp_path: Path, said: Said) -> None:
    """From pictures and words to pictures, as one would use it."""
    import numpy as np

    codec = TinyCodec(TinyCodecConfig(channels=4, encoder_widths=(8,) * 3, decoder_widths=(8,) * 3))
    codec.save(tmp_path / "codec.safetensors")
    entry = {name: {"default": {"min": [0.0] * n, "max": [1.0] * n}} for name, n in (("action", 3), ("state", 2))}
    (tmp_path / "dataset_stats.json").write_text(json.dumps(entry))
    (tmp_path / "t5").mkdir()
    text = "A video recorded from a robot's point of view executing the following instruction: stack"
    embedding = {"context": torch.randn(16, 8).bfloat16(), "mask": torch.arange(16) < 9}
    torch.save(embedding, cache_path(tmp_path / "t5", text, 16))
    options = {"stats": "dataset_stats.json", "codec": "codec.safetensors", "text": "t5"}
    arguments = [x for key, name in options.items() for x in (f"--{key}", str(tmp_path / name))]
    clip = ["--text-length", "16", "--frames", "5", "--height", "32", "--width", "48", "--heads", "2"]
    path, model = student(tmp_path / "student.pt"), tmp_path / "model"
    assert main(["import", str(path), str(model), *arguments, *clip]) == 0
    assert "latents only" not in said()[0]

    first = np.zeros((1, 32, 48, 3), np.uint8)
    action, proprio = np.zeros((1, 4, 3), np.float32), np.zeros((1, 2), np.float32)
    result = WorldModel.from_pretrained(model).predict(first, first, action, proprio, ["stack"], real_steps=1)
    assert result.real.shape == (1, 5, 32, 48, 3) and result.sim is not None


def test_a_wan_release_becomes_a_world_model(tmp_path: Path, said: Said) -> None:
    sizes = ["--action-width", "8", "--action-ffn", "12", "--action-dim", "3", "--proprio-dim", "2"]
    assert main(["import", str(wan(tmp_path / "wan")), str(tmp_path / "model"), *sizes]) == 0
    out, _ = said()
    assert "from Wan (diffusers layout), 1 blocks of 24" in out and "no VAE and no text encoder" in out
    state = load_file(tmp_path / "model" / "model.safetensors")
    assert state["action.action_encoder.weight"].shape == (8, 3)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "start.pt")]) == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([], "give --heads"),
        (["--heads", "2", "--seed", "3"], "--seed is for a Wan release"),
        (
            ["--heads", "2", "--action-backbone", "x.pt", "--transformer-only"],
            "--action-backbone, --transformer-only",
        ),
        (["--heads", "2", "--codec", "bundled"], "go together: give --stats and --text too"),
        (["--heads", "2", "--frames", "33"], "give --stats and --codec and --text too"),
        (
            ["--heads", "2", "--stats", "gone.json", "--codec", "bundled", "--text", "minilm"],
            "gone.json: no such file",
        ),
    ],
)
def test_options_that_do_not_fit_a_released_file(tmp_path: Path, said: Said, options: list[str], error: str) -> None:
    assert main(["import", str(student(tmp_path / "a.pt")), str(tmp_path / "model"), *options]) == 2
    last = said()[1]
    assert last.startswith("error: ") and error in last
    assert not (tmp_path / "model").exists()


def test_options_that_do_not_fit_a_wan_release(tmp_path: Path, said: Said) -> None:
    assert main(["import", str(wan(tmp_path / "wan")), str(tmp_path / "model"), "--heads", "2"]) == 2
    assert "--heads is for a .pt; leave it out" in said()[1]


def test_an_existing_target_is_refused_before_anything_is_read(tmp_path: Path, said: Said) -> None:
    (tmp_path / "there").mkdir()
    assert main(["import", str(tmp_path / "gone.pt"), str(tmp_path / "there")]) == 2
    assert "there exists" in said()[1]
    (tmp_path / "a.pt").touch()
    assert main(["export", str(tmp_path / "there"), str(tmp_path / "a.pt")]) == 2
    assert "a.pt exists" in said()[1]


def test_errors_are_one_line_and_leave_nothing(tmp_path: Path, said: Said) -> None:
    def change(kept: dict[str, Any]) -> None:
        del kept["mot"]["mixtures.video.head.modulation"]
        kept["mot"]["mixtures.video.extra"] = torch.zeros(1)

    student(tmp_path / "odd.pt", change)
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "cut.pt").write_bytes(student(tmp_path / "whole.pt").read_bytes()[:5000])
    for name, error in {
        "odd.pt": "missing: mot.mixtures.video.head.modulation; unexpected: mot.mixtures.video.extra",
        "text.pt": "is not a file of torch.save",
        "cut.pt": "damaged",
        "gone.pt": "no such file or directory",
        ".": "is no Wan2.2 release",
    }.items():
        assert main(["import", str(tmp_path / name), str(tmp_path / "model"), "--heads", "2"]) == 2
        assert error in said()[1]
    assert {p.name for p in tmp_path.iterdir()} == {"odd.pt", "text.pt", "cut.pt", "whole.pt"}


def test_export_of_what_is_no_model_or_does_not_fit(tmp_path: Path, said: Said) -> None:
    assert main(["export", str(tmp_path / "gone"), str(tmp_path / "a.pt")]) == 2
    assert "gone is no model directory" in said()[1]
    assert main(["export", str(tmp_path), str(tmp_path / "a.pt")]) == 2
    assert "config.json: no such file" in said()[1]
    config = WorldModelConfig(video=EXPERT, action=EXPERT, channels=4, action_positions="frame")
    WorldModel(config).save_pretrained(tmp_path / "ours")
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "a.pt")]) == 2
    assert "cannot be written in the authors' layout: action_positions is 'frame'" in said()[1]
    assert not (tmp_path / "a.pt").exists()
