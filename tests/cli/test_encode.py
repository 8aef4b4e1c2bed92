"""`simforcing encode` by the commands that a user types."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from simforcing.cli.main import main
from simforcing.data import REAL, SIM, LeRobotWriter
from simforcing.data.cache import read_cache, read_header
from simforcing.data.windows import load_split

NAMES = ("x", "y", "z", "rx", "ry", "rz", "gripper")
TINY = ("--recipe", "tiny", "--device", "cpu")


def run(*words: str | Path) -> int:
    return main([str(w) for w in words])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six episodes of 64 x 64, of which the third is too short for a window."""
    out, rng = tmp_path_factory.mktemp("encode") / "pairs", np.random.default_rng(0)
    with LeRobotWriter(out, fps=5.0, robot="widowx250s", cameras={REAL: (64, 64), SIM: (64, 64)}, state_names=NAMES,
                       action_names=NAMES, video_file_mb=1e-6) as writer:  # fmt: skip
        for k, n in enumerate((17, 21, 8, 17, 13, 13)):
            y, x = np.mgrid[0:64, 0:64] / 64
            frames = [np.stack([np.sin(3 * x + 0.3 * i + k), np.cos(2 * y - 0.2 * i), x * y], -1) for i in range(n)]
            pictures = (127 + 100 * np.array(frames)).astype(np.uint8)
            state, action = rng.normal(size=(2, n, 7)).astype(np.float32)
            writer.add_episode({REAL: pictures, SIM: pictures[:, ::-1].copy()}, state, action, f"task {k % 2}")
    return out


def test_latents_text_and_split(pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("encode", pairs, tmp_path / "l", *TINY) == 0
    said = capsys.readouterr().out
    assert "9 clips of 6 episodes, real, sim; text of hashed-words; 4 train, 1 val, 0 test" in said
    split = load_split(tmp_path / "l" / "split.json")
    assert sorted(split["train"] + split["val"]) == [0, 1, 3, 4, 5]  # the one without a window is in no part
    before = {p.name: p.read_bytes() for p in (tmp_path / "l").iterdir()}
    assert run("encode", pairs, tmp_path / "l", *TINY) == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "l").iterdir()} == before
    assert run("encode", pairs, tmp_path / "n", *TINY, "--text", "none") == 0
    assert read_header(tmp_path / "n")["text"] is None
    assert "no text" in capsys.readouterr().out


def test_shares_are_put_together(pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "l"
    assert run("encode", pairs, out, *TINY, "--shard", "2/2") == 0
    said = capsys.readouterr().out
    assert "shards of 2/2 done; the same command without --shard will make the 1 that are left" in said
    assert not out.exists()
    assert run("encode", pairs, out, *TINY) == 0
    assert len(read_cache(out, {})["start"]) == 9
    for wrong in ("0/2", "3/2", "a"):
        assert run("encode", pairs, out, *TINY, "--shard", wrong) == 2
        assert f"--shard {wrong}: give i/n" in capsys.readouterr().err


def test_other_settings_are_refused(pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("encode", pairs, tmp_path / "l", *TINY) == 0
    for words, message in (
        (("--every", "2"), "with every = 4, now every = 2"),
        (("--text", "none"), "now text = None"),
        (("--val", "2"), "divides the episodes otherwise"),
        (("--workers", "0"), "--workers 0"),
        (("--val", "5"), "leave none to train on"),
    ):
        assert run("encode", pairs, tmp_path / "l", *TINY, *words) == 2
        assert message in capsys.readouterr().err


def test_bad_episodes(pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A video with damage in its middle: headers are sound, so that only decoding finds it."""
    bad = tmp_path / "bad"
    shutil.copytree(pairs, bad)
    video = sorted(bad.rglob("*real*/**/*.mp4"))[-1]  # of the last episode alone
    content = bytearray(video.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 2000] = bytes(2000)
    video.write_bytes(content)
    assert run("encode", bad, tmp_path / "l", *TINY) == 2
    assert str(video) in capsys.readouterr().err
    assert run("encode", bad, tmp_path / "l2", *TINY, "--skip-bad") == 0
    said = capsys.readouterr().out
    assert "skipped episode 5: " in said and str(video) in said
    assert "6 episodes, 1 skipped" in said
    split = json.loads((tmp_path / "l2" / "split.json").read_text())["episodes"]
    assert 5 not in split["train"] + split["val"]
    assert set(read_cache(tmp_path / "l2", {})["episode"].tolist()) == {0, 1, 3, 4}
    assert list(read_header(tmp_path / "l2")["left_out"]) == ["5"]
