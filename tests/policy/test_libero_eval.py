"""What `policy eval` and `policy serve` ask of a policy before anything is simulated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from simforcing.cli import policy_eval
from simforcing.cli.policy_eval import PolicyEval, acting, open_policy
from simforcing.cli.policy_serve import PolicyServe
from simforcing.data.stats import Normalizer
from simforcing.errors import SimForcingError
from simforcing.policy import libero_env
from simforcing.policy.libero_env import AGENT, WRIST, Seen
from simforcing.policy.policy import Policy
from simforcing.policy.preparation import PolicyPreparation

STATS = Normalizer(np.zeros(7, np.float32), np.ones(7, np.float32))
PREPARATION = PolicyPreparation(STATS, STATS, cameras={"observation.images.image": (256, 256), "image2": (256, 256)})


def learnt(closed: float, opened: float, far: float = 0.5) -> PolicyPreparation:
    """Of a policy whose gripper and motion had these ranges."""
    low, high = (np.array([edge] * 6 + [gripper], np.float32) for edge, gripper in ((-0.5, closed), (far, opened)))
    return replace(PREPARATION, action_stats=Normalizer(low, high))


@dataclass
class Sizes:
    action_dim: int = 7
    proprio_dim: int = 8
    horizon: int = 32
    variant: str = "first-frame"


class Fake(nn.Module):
    """A policy that gives back what it is asked."""

    def __init__(self, preparation: Any = PREPARATION, **sizes: int) -> None:
        super().__init__()
        self.preparation, self.config = preparation, Sizes(**sizes)
        self.asked: list[Any] = []

    def act(
        self, images: Mapping[str, np.ndarray], state: np.ndarray, words: Sequence[str], seed: Any, steps: int
    ) -> np.ndarray:
        self.asked.append((images, state, words, seed, steps))
        return np.zeros((len(words), 32, 7), np.float32)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `Policy.from_pretrained` give a policy."""

    def use(policy: Fake) -> Fake:
        monkeypatch.setattr(Policy, "from_pretrained", lambda where: policy)
        return policy

    return use


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Fake(None), "does not say which cameras it looks at"),
        (Fake(replace(PREPARATION, cameras={})), "does not say which cameras it looks at"),
        (Fake(replace(PREPARATION, cameras={"top": (8, 8)})), "camera 'top' is none of LIBERO's"),
        (Fake(action_dim=8), "its actions have 8 numbers, LIBERO's 7"),
        (Fake(proprio_dim=7), "its states have 7 numbers, LIBERO's 8"),
        (Fake(learnt(-1.0, 1.0)), "the gripper goes from -1 to 1, in LIBERO's recordings from 0"),
        (Fake(learnt(0.0, 1.0, 2.5)), "motion goes from -0.5 to 2.5, in LIBERO's recordings from -1 to 1"),
    ],
)
def test_policies_that_do_not_fit(opened: Any, policy: Fake, message: str) -> None:
    opened(policy)
    with pytest.raises(SimForcingError, match=message):
        open_policy(Path("runs/policy"), "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replan": 33}, "--replan 33: this policy plans 1 to 32 steps"),
        ({"seed": 2**32 - 1, "trials": 2}, "--seed 4294967295: LIBERO's trials take whole numbers below 4294967296"),
        ({}, "no codec in /gone"),
    ],
)
def test_nothing_is_counted_where_no_trial_can_be_right(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], message: str
) -> None:
    """What makes every trial fail is said before the first, and leaves no folder of failures."""

    class Broken(Fake):
        def act(self, *args: Any) -> np.ndarray:
            raise SimForcingError("no codec in /gone")

    opened(Broken())
    monkeypatch.setattr(libero_env, "suite_tasks", lambda suite: [SimpleNamespace(instruction="pick", index=0)])
    monkeypatch.setattr(libero_env, "initial_states", lambda task: range(50))
    wanted: dict[str, Any] = {"suite": "libero_object", "out": tmp_path / "o", "trials": 1, **changes}
    with pytest.raises(SimForcingError, match=message):
        PolicyEval(checkpoint=Path("p"), device="cpu", **wanted).run()
    assert not (tmp_path / "o").exists()


def test_how_a_policy_is_asked(opened: Any) -> None:
    """Each camera of the policy gets the view that it is called after; samples keep their seeds."""
    policy = opened(Fake())
    act = acting(
        open_policy(Path("p"), "cpu"), PolicyEval(checkpoint=Path("p"), suite="libero_10", out=Path("o")).protocol()
    )
    views = [{AGENT: np.full((4, 4, 3), i), WRIST: np.full((4, 4, 3), 10 + i)} for i in range(2)]
    act([Seen(view, np.full(8, i, np.float32)) for i, view in enumerate(views)], ["a", "b"], [3, 4])
    images, state, words, seed, steps = policy.asked[0]
    assert [images[key][:, 0, 0, 0].tolist() for key in PREPARATION.cameras] == [[0, 1], [10, 11]]
    assert state[:, 0].tolist() == [0, 1] and words == ["a", "b"] and seed == [3, 4] and steps == 10


def test_defaults_are_the_references() -> None:
    command = PolicyEval(checkpoint=Path("p"), suite="libero_object", out=Path("o"))
    protocol = command.protocol()
    assert (protocol.wait, protocol.limit, protocol.replan, protocol.denoising) == (30, 400, 10, 10)
    assert (protocol.seed, protocol.noise, protocol.binarise, protocol.size) == (42, "fixed", True, 256)
    assert replace(command, suite="libero_10").protocol().limit == 700
    assert replace(command, limit=220).protocol().limit == 220
    row = {"successes": 1, "trials": 2, "rate": 0.5, "low": 0.1, "high": 0.9, "endings": {"limit": 0, "crash": 1}}
    assert policy_eval.say_rate(row) == "1/2 = 50.0 % [10.0, 90.0] (1 crash)"


def test_what_is_served(opened: Any) -> None:
    command = PolicyServe(checkpoint=Path("runs/policy/model"))
    assert command.host == "127.0.0.1"
    opened(Fake())
    told = command.served().metadata()
    assert told["policy"] == "model" and told["cameras"] == {
        "observation/image": [256, 256],
        "observation/image2": [256, 256],
    }
    assert len(told["policy_sha256"]) == 64 and told["action_dim"] == 7
    opened(Fake(action_dim=8))
    with pytest.raises(SimForcingError, match="--actions libero: actions have 8 numbers"):
        replace(command, actions="libero").served()
    opened(SimpleNamespace(config=Sizes(), preparation=None))
    with pytest.raises(SimForcingError, match="does not say which cameras"):
        command.served()
    with pytest.raises(SimForcingError, match="--denoising 0"):
        replace(command, denoising=0).served()
