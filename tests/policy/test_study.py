"""`scripts/policy_study.py`: its commands are ones that there are, its order, its page."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tyro

from simforcing.cli.main import COMMANDS
from simforcing.errors import SimForcingError

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name: str) -> ModuleType:
    """A module of `scripts/`, which is no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return script("policy_page")


@pytest.fixture(scope="module")
def study(page: ModuleType) -> ModuleType:
    return script("policy_study")


def test_every_command_is_one_and_needs_what_was_made_before(study: ModuleType, tmp_path: Path) -> None:
    sizes = study.Sizes()
    made: set[Path] = set()
    count = 0
    for beside in study.rounds(tmp_path, sizes, 2):
        begun = set(made)
        for chain in beside:
            there = set(begun)
            for command in chain:
                kind = next(c for c in COMMANDS if command.words[: len(c.words)] == c.words)
                tyro.cli(kind.load(), args=list(command.words[len(kind.words) :]))
                places = {p for p in map(Path, command.words[len(kind.words) :]) if p.is_relative_to(tmp_path)}
                places |= {Path(w.split(":", 1)[1]) for w in command.words if w.startswith(("student:", "teacher:"))}
                own = command.made if command.made.suffix == "" else command.made.parent
                needed = {p for p in places if p not in (own, tmp_path / "parts", tmp_path / "unused", own.parent)}
                unknown = {p for p in needed if not any(p == t or t.is_relative_to(p) for t in there)}
                assert not unknown, (command.words, unknown)
                there.add(command.made)
                count += 1
            made |= there
    assert count == 6 + 2 + 3 * len(list(study.policies(sizes)))
    assert len(list(study.policies(sizes))) == 2 * 3 * len(sizes.seeds) + 2 * len(sizes.seeds)


MADE_BY: dict[str, Any] = {"policy_sha256": "w", "protocol_sha256": "p", "fingerprint": {"mujoco": "3"}}


def run(out: Path, name: str, errors: list[float], endings: dict[str, list[str]]) -> None:
    """What a trained and tested policy leaves behind."""
    (out / "policies" / name / "model").mkdir(parents=True)
    rows = [{"step": 10 * (i + 1), "seconds": i, "val_action_error": e} for i, e in enumerate(errors)]
    rows.append(rows[-1])  # the last step is validated twice
    (out / "policies" / name / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for task, ended in endings.items():
        folder = out / "evaluations" / name / "trials" / task
        folder.mkdir(parents=True)
        for trial, ending in enumerate(ended):
            record = {"trial": trial, "ending": ending, "suite": "t", "task": int(task[-2:]), **MADE_BY}
            (folder / f"{trial:03d}.json").write_text(json.dumps(record))


@pytest.fixture
def out(page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study's folder without policies; the weights of any are known as `w`."""
    monkeypatch.setattr(page, "policy_hash", lambda model: "w")
    out = tmp_path / "run"
    (out / "demos/meta").mkdir(parents=True)
    expert = {"t-00": {"episodes": 5, "attempts": 6}}
    (out / "demos/meta/simforcing.json").write_text(json.dumps({"libero": {"expert": {"tasks": expert}}}))
    for name in ("teacher", "student"):
        (out / name).mkdir()
        (out / name / "log.jsonl").write_text(json.dumps({"step": 7, "seconds": 1.0, "val_action_ratio": 1.5}))
    return out


def test_the_page_says_what_was_measured(page: ModuleType, study: ModuleType, out: Path, tmp_path: Path) -> None:
    good, bad = ["success", "success", "success", "limit"], ["limit", "limit", "success", "crash"]
    for seed in (0, 1, 2):
        run(out, f"unconditional-none-{seed}", [0.4, 0.3, 0.2], {"t-00": bad, "t-01": bad})
        run(out, f"unconditional-student-{seed}", [0.3, 0.2, 0.1], {"t-00": good, "t-01": good})
    run(out, "unconditional-teacher-0", [0.5, 0.5, 0.25], {"t-00": good[:2]})  # not all of its trials
    run(out, "action-only-student-nothing-1", [0.3, 0.3, 0.3], {"t-00": bad, "t-01": good})  # one of the seeds
    for seed in (0, 1, 2):
        run(out, f"action-only-student-{seed}", [0.3, 0.3, 0.3], {"t-00": bad, "t-01": bad})
        run(out, f"action-only-student-video-{seed}", [0.3, 0.3, 0.3], {"t-00": bad, "t-01": good})
    sizes: dict[str, Any] = {**study.asdict(study.Sizes()), "trials": 4, "tasks": ["0", "1"]}
    target = tmp_path / "docs/policy-results.md"
    page.write_page(target, out, sizes, list(study.policies(study.Sizes())))
    text = target.read_text()
    assert "| unconditional | scratch | 3/12 | 3/12 | **25 %** [" in text
    row = next(line for line in text.splitlines() if line.startswith("| unconditional | student | 9/12 | 9/12"))
    assert "**75 %** [" in row and " | +50 [" in row and row.endswith("] |  |")
    assert "| unconditional | teacher | | | not run | | |" in text
    assert "| action-only | student, without its action expert | | | 8 trials so far | | |" in text
    row = next(
        line for line in text.splitlines() if "| student, its video expert for actions, too | 3/12 | 9/12" in line
    )
    assert "**50 %** [" in row and "] |  | +25 [" in row  # no scratch of this setting; 25 points above the student
    assert "| unconditional | student | 0.1000, 0.1000, 0.1000 | 20 of 30 |" in text
    assert "| unconditional | teacher | 0.2500 | not within 30 |" in text
    assert "t-00 5 of 6" in text and "## Trials" not in text
    numbers = json.loads(target.with_suffix(".json").read_text())
    assert numbers["world models"]["student"]["val_action_ratio"] == 1.5
    assert (tmp_path / "docs/images/policy-curves.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("made_by", "said"),
    [
        ({"policy_sha256": "v"}, "of other weights than the policy has"),
        ({"protocol_sha256": "q"}, "of another protocol than"),
        ({"fingerprint": {"mujoco": "2"}}, "simulated by different means"),
    ],
)
def test_trials_of_something_else_are_not_averaged(
    made_by: dict[str, Any], said: str, page: ModuleType, study: ModuleType, out: Path, tmp_path: Path
) -> None:
    for seed in (0, 1):
        run(out, f"unconditional-none-{seed}", [0.4], {"t-00": ["success"] * 3, "t-01": ["limit"] * 3})
    file = out / "evaluations/unconditional-none-1/trials/t-01/002.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **made_by}))
    sizes: dict[str, Any] = {**study.asdict(study.Sizes()), "trials": 3, "tasks": ["0", "1"]}
    with pytest.raises(SimForcingError, match=said):
        page.write_page(tmp_path / "docs/p.md", out, sizes, list(study.policies(study.Sizes())))


def test_a_folder_of_other_sizes_is_refused(study: ModuleType, tmp_path: Path) -> None:
    study.claim(tmp_path, study.Sizes(trials=10))
    study.claim(tmp_path, study.Sizes(trials=20, seeds=(0, 1, 2)))
    with pytest.raises(SimForcingError, match="policy_steps is 1500 there, 7 now"):
        study.claim(tmp_path, study.Sizes(policy_steps=7))


def test_seeds_and_states_are_paired(page: ModuleType) -> None:
    endings = {"t-01": ["limit", "success"], "t-00": ["success", "limit"]}
    keys = [("a", "none", 0), ("a", "none", 1)]
    found = {key: {"trials": endings} for key in keys}
    np.testing.assert_array_equal(page.successes(found, keys, 2), [[1, 0, 0, 1], [1, 0, 0, 1]])
    assert page.successes(found, [*keys, ("a", "none", 2)], 2) is None  # a seed is not tried yet
    assert page.successes(found, keys, 3) is None  # nor a task


def test_the_committed_page_says_its_numbers(page: ModuleType, study: ModuleType) -> None:
    docs = Path(__file__).parents[2] / "docs"
    written, numbers = (docs / "policy-results.md").read_text(), json.loads((docs / "policy-results.json").read_text())
    keys = list(study.policies(study.Sizes(**numbers["sizes"])))
    found = {key: numbers["policies"]["-".join(map(str, key))] for key in keys}
    assert written.split("## Trials")[0].rstrip() == "\n".join(page.lines(numbers, keys, found, []))
    assert numbers["sizes"] == json.loads(json.dumps(study.asdict(study.Sizes())))  # of the defaults, as it says
    said = written.replace("*", "")
    for place in (docs / "policy.md", docs / "decisions.md", docs.parent / "README.md"):
        quoted = QUOTED.findall(about_policies(place.read_text()))
        assert quoted, place
        assert [number for number in quoted if number not in said] == [], place


QUOTED = re.compile(r"[+-]?\d+(?: %)? \[[+-]?\d+, [+-]?\d+\]")
"""A rate or a difference with its interval, as pages write them."""


def about_policies(text: str) -> str:
    """The parts of a document that tell the study's results, on one line."""
    found = re.findall(r"(?:^## What it was worth|^On LIBERO|^## 33\.).*?(?=^## |\Z)", text, re.M | re.S)
    return " ".join(" ".join(found).split())
