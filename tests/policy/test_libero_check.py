"""Recordings of LIBERO: cameras' names, rate, numbers, and how pictures lie."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simforcing.cli.policy_train import PolicyTrain, doubt
from simforcing.data import LeRobotWriter, open_dataset
from simforcing.errors import SimForcingError
from simforcing.policy.libero_check import agent_orientation, are_liberos, by_role, camera_roles, check_recordings
from simforcing.policy.libero_env import AGENT, WRIST
from simforcing.recipes import POLICIES

TURNS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as seen": lambda v: v,
    "mirrored": lambda v: v[:, :, ::-1],
    "upside down": lambda v: v[:, ::-1],
    "upside down and mirrored": lambda v: v[:, ::-1, ::-1],
}


def scene(seed: int, count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """A hand that wanders before a camera in front of the robot, in pictures as they are seen, and its places."""
    rng = np.random.default_rng(seed)
    steps = rng.normal(0, 0.02, (count, 3))
    hand = np.cumsum(0.8 * steps + 0.2 * np.roll(steps, 1, 0), axis=0)
    hand = np.clip(hand - hand.mean(0), -0.2, 0.2)
    frames = np.full((count, 64, 64, 3), 90, np.uint8)
    for frame, (x, y, z) in zip(frames, hand, strict=True):
        row, column = 32 - 90 * z + 40 * x, 32 + 110 * y
        frame[int(row) - 4 : int(row) + 4, int(column) - 4 : int(column) + 4] = 230
    return frames, hand


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("seed", range(4))
def test_orientation(name: str, seed: int) -> None:
    frames, hand = scene(seed)
    found = agent_orientation([(np.ascontiguousarray(TURNS[name](frames)), hand)])
    assert str(found) == name
    assert min(found.strength) > 0.5 and found.frames > 30


def test_what_does_not_move_says_nothing() -> None:
    frames, hand = scene(0)
    with pytest.raises(SimForcingError, match="moves in 0 frames only"):
        agent_orientation([(np.zeros_like(frames), hand)])
    with pytest.raises(SimForcingError, match="along a line"):
        agent_orientation([(frames, hand * [1, 0, 1])])
    with pytest.raises(SimForcingError, match="too small"):
        agent_orientation([(frames[:, :16, :16], hand)])


@pytest.mark.parametrize(
    "names",
    [
        ("observation.images.image", "observation.images.wrist_image"),
        ("observation.images.image", "observation.images.image2"),
        ("agentview_rgb", "eye_in_hand_rgb"),
    ],
)
def test_names_of_public_sets(names: tuple[str, str]) -> None:
    roles = camera_roles(names)
    assert list(roles.values()) == [AGENT, WRIST]
    views = {AGENT: np.zeros(1), WRIST: np.ones(1)}
    assert [view[0] for view in by_role(views, roles).values()] == [0, 1]


def test_other_names() -> None:
    with pytest.raises(SimForcingError, match="camera 'top' is none of LIBERO's"):
        camera_roles(["top"])
    with pytest.raises(SimForcingError, match="two of them show the same view"):
        camera_roles(["image", "observation.images.agentview"])


def recordings(out: Path, **changes: Any) -> Path:
    given = {"turn": "mirrored", "fps": 20, "state": 8, "action": 7, "names": (AGENT, WRIST), "gripper": 1} | changes
    with LeRobotWriter(
        out,
        fps=given["fps"],
        robot="panda",
        cameras=dict.fromkeys(given["names"], (64, 64)),
        state_names=[f"s{i}" for i in range(given["state"])],
        action_names=[f"a{i}" for i in range(given["action"])],
    ) as writer:
        for seed in (1,):
            frames, hand = scene(seed, 40)
            video = np.ascontiguousarray(TURNS[given["turn"]](frames))
            state = np.zeros((len(hand), given["state"]), np.float32)
            state[:, :3] = hand
            action = np.random.default_rng(0).uniform(-1, 1, (len(hand), given["action"])).astype(np.float32)
            action[:, 6] = np.where(np.arange(len(hand)) < 20, given["gripper"], 0)
            writer.add_episode(dict.fromkeys(given["names"], video), state, action, "pick up the milk")
    return out


def test_recordings(tmp_path: Path) -> None:
    data = open_dataset(recordings(tmp_path / "good"))
    assert are_liberos(data) and check_recordings(data) == {}


def test_the_agent_view_is_on_the_left_and_actions_are_changes(tmp_path: Path) -> None:
    """Whatever a public set says first, and though nothing is declared of its actions."""
    data = open_dataset(recordings(tmp_path / "turned", names=(WRIST, AGENT)))
    assert list(data.cameras) == [WRIST, AGENT] and data.action_convention.kind == "absolute"
    found = PolicyTrain(tmp_path / "turned", out=tmp_path / "x")._content(data, POLICIES["policy-tiny"])
    assert (found.cameras, found.after_end) == ((AGENT, WRIST), "still")
    one = PolicyTrain(tmp_path / "turned", out=tmp_path / "x", cameras=(WRIST,), after_end="last")
    found = one._content(data, POLICIES["policy-tiny"])
    assert (found.cameras, found.after_end) == ((WRIST,), "last")


def test_doubts_are_said_of_what_seems_to_be_liberos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doubt(open_dataset(recordings(tmp_path / "slow", fps=10)))
    assert capsys.readouterr().err == "doubtful: rate: 10 frames a second, LIBERO has 20\n"
    doubt(open_dataset(recordings(tmp_path / "other", fps=10, names=("observation.images.top",))))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("changes", "what", "words"),
    [
        ({"turn": "as seen"}, "orientation", "are as seen, LIBERO's recordings are mirrored"),
        ({"turn": "upside down"}, "orientation", "are upside down"),
        ({"fps": 10}, "rate", "10 frames a second, LIBERO has 20"),
        ({"state": 7}, "state", "state has 7 numbers, LIBERO's 8"),
        ({"action": 8}, "action", "action has 8 numbers, LIBERO's 7"),
        ({"gripper": -1}, "action", "the gripper goes from -1 to 0, in LIBERO's recordings from 0"),
        ({"names": (AGENT,)}, "cameras", "there is only"),
        ({"names": ("observation.images.top",)}, "cameras", "none of LIBERO's"),
    ],
)
def test_wrong_recordings(tmp_path: Path, changes: dict[str, Any], what: str, words: str) -> None:
    found = check_recordings(open_dataset(recordings(tmp_path / "bad", **changes)))
    assert list(found) == [what] and words in found[what]
