"""`simforcing data audit` and `data convert` as a user types them."""

import json

import numpy as np
import pytest

from simforcing.cli.main import main
from simforcing.data import REAL, LeRobotWriter, open_dataset

NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")


@pytest.fixture
def sound(tmp_path):
    root = tmp_path / "sound"
    y, x = np.mgrid[0:32, 0:48] / 48
    with LeRobotWriter(
        root, fps=5, robot="panda", cameras={REAL: (32, 48)}, state_names=NAMES, action_names=NAMES
    ) as writer:
        steps = np.arange(24)[:, None]
        rows = 0.5 * np.sin(0.2 * steps + np.arange(7)).astype(np.float32)
        view = 127 + 90 * np.sin(4 * x[None] + 3 * y[None] + 0.3 * steps[..., None])
        writer.add_episode({REAL: np.repeat(view[..., None], 3, -1).astype(np.uint8)}, rows, rows, "wave")
    return root


def test_a_clean_dataset(sound, capsys):
    assert main(["data", "audit", str(sound)]) == 0
    text = capsys.readouterr().out
    assert "LeRobot v3.0, panda" in text and text.endswith("clean\n")
    assert "windows   bridge: 4 in 1 episodes" in text and "rate      5 a second as stated, measured 5" in text


def test_findings_and_json(sound, capsys):
    info = json.loads((sound / "meta/info.json").read_text())
    (sound / "meta/info.json").write_text(json.dumps(info | {"total_tasks": 7}))
    assert main(["data", "audit", str(sound)]) == 1
    text = capsys.readouterr().out
    assert "warning contradicting_metadata: " in text and text.endswith("1 warning\n")
    assert main(["data", "audit", str(sound), "--json", "--quick"]) == 1
    stored = json.loads(capsys.readouterr().out)
    assert [f["kind"] for f in stored["findings"]] == ["contradicting_metadata"] and stored["robot"] == "panda"


def test_many_findings_are_cut_short(shared, capsys):
    root = str(shared / "data/odd/lerobot_g1_v21")
    assert main(["data", "audit", root, "--quick"]) == 1
    short = capsys.readouterr().out
    assert "error   missing_video: and 95 more (--all)" in short
    assert main(["data", "audit", root, "--quick", "--all"]) == 1
    assert len(capsys.readouterr().out.splitlines()) > 190 > 40 > len(short.splitlines())


@pytest.mark.parametrize("name", ["nowhere", "odd/bridge_real_640x480", "odd/omx_malformed_v3/dataset"])
def test_unreadable(shared, capsys, name):
    assert main(["data", "audit", str(shared / "data" / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and name in error


def test_convert(sound, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["data", "convert", str(sound), str(out), "--delta", "target", "--rotation", "rotvec"]) == 0
    assert capsys.readouterr().out == f"{out}: 1 episodes, 24 rows; actions delta to the target, rotvec\n"
    assert open_dataset(out).action_convention.relative_to == "target"
    assert main(["data", "convert", str(sound), str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["data", "convert", str(sound), str(tmp_path / "b"), "--absolute", "--delta", "state"]) == 2
    assert "exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["audit", "convert"])
def test_help_has_an_example(command, capsys):
    with pytest.raises(SystemExit):
        main(["data", command, "--help"])
    assert f"simforcing data {command}" in capsys.readouterr().out
