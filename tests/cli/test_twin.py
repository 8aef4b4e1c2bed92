"""`simforcing twin pair` and `twin augment` as a user types them."""

from pathlib import Path

import pytest

from simforcing.cli.main import main
from simforcing.data import open_dataset
from simforcing.data.windows import save_split
from simforcing.twin import playground


def run(*words: object) -> int:
    return main([str(word) for word in words])


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that a refused command prints."""
    capsys.readouterr()
    assert run(*words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short episodes of the bundled world; also real episodes, whose camera is REAL."""
    out = tmp_path_factory.mktemp("world") / "pairs"
    playground.write_pairs(out, [0, 1], playground.WorldConfig(size=64, length=14), workers=1)
    return out


def test_shards_then_the_whole(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("twin", "pair", world, tmp_path / "out", "--robot", "widowx250s", "--qa-episodes", "0")
    assert run(*command, "--shard", "1/2") == 0
    said = capsys.readouterr().out
    assert "1 episodes, 14 frames" in said
    assert "the same command without --shard will draw the 1 that are left and put all together" in said
    assert run(*command, "--shard", "2/2") == 0
    assert "without --shard will put them together" in capsys.readouterr().out
    assert run(*command) == 0
    assert "2 episodes, 28 frames" in capsys.readouterr().out
    assert len(open_dataset(tmp_path / "out")) == 2
    assert "--shard 3/2: give i/n" in refused(capsys, *command[:3], tmp_path / "more", *command[4:], "--shard", "3/2")
    assert "--shard half: give i/n" in refused(capsys, *command[:3], tmp_path / "more", *command[4:], "--shard", "half")


def test_doubtful_pairs_are_named(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ("--start-pose", 0.2, 0, 0.2, 0, 0.3, 0)
    data = shared / "data" / "bridge"
    says = refused(capsys, "twin", "pair", data, tmp_path / "out", "--robot", "widowx250s")
    assert "no state to follow; use --follow action --start-pose" in says
    words = ("twin", "pair", data, tmp_path / "out", "--robot", "widowx250s", "--follow", "action", "--skip-bad")
    assert run(*words, "--shard", "5/7", *start) == 0
    assert "1 episodes, 27 frames" in capsys.readouterr().out


def test_augment_says_what_was_gained(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = tmp_path / "split.json"
    save_split(split, {"train": [1], "val": [0]})
    assert run("twin", "augment", world, tmp_path / "out", "--per-episode", 2, "--split", split) == 0
    said = capsys.readouterr()
    assert "2 rollouts (" in said.out
    assert "28 frames; the arm visits" in said.out
    assert "rollouts: 100 % of 1 of 1 episodes" in said.err
    made = open_dataset(tmp_path / "out").meta["augmentation"]["rollouts"]
    assert [row["source"] for row in made] == [1, 1]


def test_augment_refuses(world: Path, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    save_split(tmp_path / "split.json", {"val": [0]})
    for words, says in (
        ((world, out, "--per-episode", 0), "give at least 1 rollout"),
        ((world, world, "--per-episode", 1), "exists already"),
        ((world, out, "--per-episode", 1, "--spliced", 2), "shares must not be negative and sum to at most 1"),
        ((world, out, "--per-episode", 1, "--split", tmp_path / "split.json"), "has no part 'train', only val"),
        ((shared / "data/lerobot_v30", out, "--per-episode", 1), "does not say robot and camera"),
        (
            (world, out, "--per-episode", 1, "--robot", "panda"),
            "made with 'widowx250s', and bundled panda is another model",
        ),
    ):
        assert says in refused(capsys, "twin", "augment", *words)
    assert not out.exists()
