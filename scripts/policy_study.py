"""What a world model is worth to a policy, small enough for two cores: everything from demonstrations to the page.

    python scripts/policy_study.py --out runs/policy-study --page docs/policy-results.md

Demonstrations of three LIBERO tasks, their twin, teacher and student on it, then policies from scratch, from the
teacher, from the student and from parts of it: the same data, steps and seeds, only the first weights differ. Each
command is one of `simforcing`; those whose result is there are not run again, those that were ended go on. Needs `pip
install -e '.[sim,libero]'`. `--page` alone, with everything done, only writes the page, its JSON and its pictures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from policy_page import write_page
from simforcing.data.windows import load_split
from simforcing.errors import SimForcingError
from simforcing.files import write_text

SETTINGS = ("unconditional", "action-only")
STARTS = ("none", "student", "teacher")
PARTS = {"student-video": "video", "student-nothing": "nothing"}
"""Starts that take over less of the student, by what `--action-from` then says: action-only."""
ROBOT = ("--robot", "panda", "--ee", "grip_site", "--camera", "image")


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    suite: str = "libero_object"
    tasks: tuple[str, ...] = ("0", "1", "4")
    episodes: int = 25  # demonstrations of a task
    val: int = 9  # of all demonstrations
    augmented: int = 4  # simulated rollouts a demonstration, for the teacher
    teacher_steps: int = 1500
    student_steps: int = 600
    policy_steps: int = 1500
    action_only_steps: int = 3000  # each costs a quarter: only the first frame is looked at
    validations: int = 10  # of each policy
    seeds: tuple[int, ...] = (0, 1, 2)
    trials: int = 20
    limit: int = 240  # steps until a trial has failed; the demonstrations take 100 to 190
    filmed: int = 1


@dataclass(frozen=True)
class Args(Sizes):
    """Where to, and beside how many."""

    out: Path = Path("runs/policy-study")
    page: Path | None = None  # what to write; its JSON and pictures lie beside it
    workers: int = 2
    run: bool = True  # --no-run: only write the page of what is there


@dataclass(frozen=True)
class Command:
    """Words after `simforcing`; done when `made` exists."""

    made: Path
    words: tuple[str, ...]


Chain = Sequence[Command]
"""Commands one after the other."""


def main(args: Args) -> None:
    """Runs what is missing, then writes the page."""
    sizes = Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})
    claim(args.out, sizes)
    if args.run:
        for beside in rounds(args.out, sizes, args.workers):
            with ThreadPoolExecutor(args.workers) as pool:
                list(pool.map(lambda chain: carry_out(chain, args.out), beside))
    check_splits(args.out)
    if args.page is not None:
        write_page(args.page, args.out, asdict(sizes), list(policies(sizes)))


def claim(out: Path, sizes: Sizes) -> None:
    """Makes OUT the folder of a study of these sizes; seeds and trials may grow.

    Raises:
        SimForcingError: it is one of other sizes.
    """
    out.mkdir(parents=True, exist_ok=True)
    file, wanted = out / "sizes.json", json.loads(json.dumps(asdict(sizes)))
    stored = json.loads(file.read_text()) if file.exists() else wanted
    differs = [name for name in wanted if stored.get(name) != wanted[name] and name not in ("seeds", "trials")]
    if differs:
        told = ", ".join(f"{name} is {stored.get(name)!r} there, {wanted[name]!r} now" for name in differs)
        raise SimForcingError(f"{out}: a study of other sizes ({told}); choose another --out")
    write_text(file, json.dumps(wanted, indent=1) + "\n")


def policies(sizes: Sizes) -> Iterator[tuple[str, str, int]]:
    """Setting, start and seed of each policy."""
    for start in STARTS:
        for seed in sizes.seeds:
            for setting in SETTINGS:
                yield setting, start, seed
    for start in PARTS:
        for seed in sizes.seeds:
            yield "action-only", start, seed


def rounds(out: Path, sizes: Sizes, workers: int) -> Iterator[list[Chain]]:
    """Chains that may run beside each other, round by round."""
    crew = ("--workers", str(workers))
    demos, pairs, latents, rollouts = (out / name for name in ("demos", "pairs", "latents", "rollouts"))
    recipe, val = ("--recipe", "libero-tiny"), ("--val", str(sizes.val))
    chosen = ("--suite", sizes.suite, "--tasks", *sizes.tasks)
    kept = ("--parts", str(out / "parts"))
    many = ("--episodes", str(sizes.episodes))
    yield [[Command(demos, ("policy", "demos", *chosen, *many, *kept, *crew, "--out", str(demos)))]]
    yield [[Command(pairs, ("twin", "pair", str(demos), str(pairs), *ROBOT, *crew))]]
    split = latents / "split.json"
    yield [[Command(split, ("encode", str(pairs), str(latents), *recipe, *val, *crew))]]
    per = ("--per-episode", str(sizes.augmented), "--split", str(split))
    windows = out / "windows"
    encode = ("policy", "train", str(demos), "--encode-only", "--latents", str(windows), "--out", str(out / "unused"))
    yield [[Command(rollouts, ("twin", "augment", str(pairs), str(rollouts), *per, *crew))]]
    yield [[Command(windows / "index.json", (*encode, *val, *crew))]]
    encoded = out / "rollout-latents"
    yield [[Command(encoded / "split.json", ("encode", str(rollouts), str(encoded), *recipe, *crew))]]
    each = {
        (setting, start, seed): policy(out, sizes, setting, start, seed) for setting, start, seed in policies(sizes)
    }
    yield [world_models(out, sizes, recipe), *(chain for (_, start, _), chain in each.items() if start == "none")]
    yield [chain for (_, start, _), chain in each.items() if start != "none"]


def world_models(out: Path, sizes: Sizes, recipe: Sequence[str]) -> Chain:
    """The teacher on simulated rollouts, then the student on pairs."""
    teacher, student = out / "teacher", out / "student"
    one = ("--threads", "1")
    first = ("train", "teacher", *recipe, "--data", str(out / "rollout-latents"), "--out", str(teacher), *one)
    then = ("train", "student", *recipe, "--data", str(out / "latents"), "--out", str(student), *one)
    return [
        Command(teacher / "model", (*first, "--steps", str(sizes.teacher_steps))),
        Command(student / "model", (*then, "--teacher", str(teacher / "model"), "--steps", str(sizes.student_steps))),
    ]


def policy(out: Path, sizes: Sizes, setting: str, start: str, seed: int) -> Chain:
    """Its training, a few filmed trials, then all trials."""
    name = f"{setting}-{start}-{seed}"
    run, evaluation = out / "policies" / name, out / "evaluations" / name
    model = start.partition("-")[0]
    source = "none" if start == "none" else f"{model}:{out / model / 'model'}"
    train = ("policy", "train", str(out / "demos"), "--setting", setting, "--from", source, "--out", str(run))
    if start in PARTS:
        train = (*train, "--action-from", PARTS[start])
    data = ("--latents", str(out / "windows"), "--val", str(sizes.val), "--seed", str(seed), "--threads", "1")
    steps = sizes.action_only_steps if setting == "action-only" else sizes.policy_steps
    length = ("--steps", str(steps), "--validate-every", str(steps // sizes.validations))
    length = (*length, "--set", "training.validate_seconds=1e9")  # so that curves have the same points
    test = ("policy", "eval", str(run / "model"), "--suite", sizes.suite, "--tasks", *sizes.tasks)
    test = (*test, "--limit", str(sizes.limit), "--out", str(evaluation))
    return [
        Command(run / "model", (*train, *data, *length)),
        Command(
            evaluation / "results.json", (*test, "--trials", str(min(sizes.filmed, sizes.trials)), "--videos", "1")
        ),
        Command(evaluation / f"{sizes.trials}-trials", (*test, "--trials", str(sizes.trials), "--videos", "0")),
    ]


def carry_out(chain: Chain, out: Path) -> None:
    """What is missing of a chain. Raises SimForcingError where a command fails; its words are in the log."""
    logs = out / "logs"
    logs.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for command in chain:
        if command.made.exists():
            continue
        log = logs / f"{command.made.relative_to(out).as_posix().replace('/', '-')}.log"
        begun = time.monotonic()
        print("simforcing", *command.words, flush=True)
        with log.open("a") as stream:
            code = subprocess.run(
                [sys.executable, "-m", "simforcing.cli.main", *command.words],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
            ).returncode
        if code:
            raise SimForcingError(f"simforcing {' '.join(command.words[:3])} ended with code {code}; see {log}")
        if command.made.suffix == "" and not command.made.exists():
            command.made.touch()  # a mark of its own, where the command makes no new file
        print(f"{time.monotonic() - begun:.0f} s: {command.made}", flush=True)


def check_splits(out: Path) -> None:
    """World models and policies hold out the same demonstrations. Raises SimForcingError where they do not."""
    parts = [load_split(file)["val"] for file in (out / "policies").glob("*/split.json")]
    mine = load_split(out / "latents/split.json")["val"]
    if any(sorted(part) != sorted(mine) for part in parts):
        raise SimForcingError(f"the world models hold out {mine}, policies {parts}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except SimForcingError as error:
        sys.exit(f"error: {error}")
