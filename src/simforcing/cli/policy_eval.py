"""`simforcing policy eval`: how often a policy solves LIBERO's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from simforcing.errors import SimForcingError, check_seed

if TYPE_CHECKING:
    import numpy as np

    from simforcing.policy.libero_env import Seen, Task
    from simforcing.policy.libero_results import Folder, Rate
    from simforcing.policy.libero_trials import Act, Job, Protocol
    from simforcing.policy.policy import Policy

MOST_SEEDS = 2**32
"""LIBERO seeds NumPy's old generator, which takes no larger ones."""


@dataclass(frozen=True, kw_only=True)
class PolicyEval:
    """Success rates of a policy on a suite of LIBERO, with Wilson intervals, in simulation.

    Example:
      simforcing policy eval runs/policy/model --suite libero_object --tasks 0 ketchup --trials 20 --out runs/eval

    Trial i begins at the benchmark's i-th initial state. Every trial is kept as soon as it ends: the same command goes
    on where it stopped, or adds trials. Success is the simulator's own check; everything else is a failure. Trials of
    another policy, protocol or simulation are refused. Defaults are FastWAM's protocol.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Directory of a policy."""
    suite: Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]
    """Ten tasks each (libero_90: ninety)."""
    out: Path
    """Folder of the results; one of the same policy and protocol is gone on with."""
    tasks: tuple[str, ...] = ()
    """Numbers of tasks, or words that only one instruction has; default: all."""
    trials: int = 50
    """Of each task; the benchmark has 50 initial states."""
    workers: int = 1
    """Simulations beside each other, each in a process of its own."""
    wait: int = 30
    """Steps with the gripper open before the policy begins; not counted in the limit."""
    limit: int | None = None
    """Steps until a trial has failed; default 400, of libero_10 and libero_90 700."""
    replan: int = 10
    """Steps that are executed of each chunk."""
    denoising: int = 10
    """Steps from noise to actions."""
    seed: int = 42
    """Of what the initial state leaves open, and of the noise."""
    noise: Literal["fixed", "fresh"] = "fixed"
    """fixed: every chunk of every trial starts from the same noise; fresh: each from noise of its own."""
    binarise: bool = True
    """Tell the gripper to open or to close, nothing between."""
    batched: bool = False
    """Decide for several trials at once; faster on a GPU, but the last digits then depend on which trials."""
    patience: float = 600.0
    """Seconds without a word from a simulation after which its trial is a time-out."""
    retry: bool = False
    """Run trials again that ended by a time-out or a crash."""
    videos: int = 2
    """Videos of each task and each way to end."""
    device: str = "auto"
    """Where the policy runs: cpu, cuda, or auto: a GPU where there is one."""

    def run(self) -> int:
        """Runs what is missing, prints and writes the rates."""
        from simforcing.cli.show import counted, progress
        from simforcing.evaluate.measure import weights_hash
        from simforcing.policy.libero_env import choose, initial_states, suite_tasks
        from simforcing.policy.libero_results import UNUSUAL, Folder
        from simforcing.policy.libero_trials import run_trials

        check_seed(self.seed, "--seed")
        protocol, tasks = self.protocol(), choose(suite_tasks(self.suite), self.tasks)
        most = min(len(initial_states(task)) for task in tasks)
        if not 1 <= self.trials <= most:
            raise SimForcingError(f"--trials {self.trials}: these tasks have 1 to {most} initial states")
        if self.seed + self.trials > MOST_SEEDS:
            raise SimForcingError(f"--seed {self.seed}: LIBERO's trials take whole numbers below {MOST_SEEDS}")
        policy = open_policy(self.checkpoint, self.device)
        if not 1 <= self.replan <= policy.config.horizon:
            raise SimForcingError(f"--replan {self.replan}: this policy plans 1 to {policy.config.horizon} steps")
        act = acting(policy, protocol)
        try_out(act, protocol, tasks)
        folder = Folder(self.out, str(self.checkpoint), weights_hash(policy), protocol)
        folder.claim()
        jobs: list[Job] = []
        for trial in range(self.trials):
            for task in tasks:
                found = folder.read(task, trial)
                if found is None or (self.retry and found["ending"] in UNUSUAL):
                    jobs.append(folder.job(task, trial, self.videos > 0))
        jobs.sort(key=lambda job: job.task.index)  # a worker keeps the world of a task
        with progress() as report:
            ended = run_trials(jobs, protocol, act, min(self.workers, len(jobs) or 1), self.patience)
            for done, (job, outcome) in enumerate(ended, 1):
                folder.write(job, outcome, self.videos)
                counted("trials", report)(done, len(jobs), f"{job.task.name} {outcome.ending}")
        return self._tell(folder, tasks)

    def protocol(self) -> Protocol:
        """What the options say."""
        from simforcing.policy.libero_trials import LIMITS, Protocol

        return Protocol(
            suite=self.suite,
            limit=LIMITS[self.suite] if self.limit is None else self.limit,
            wait=self.wait,
            replan=self.replan,
            denoising=self.denoising,
            seed=self.seed,
            noise=self.noise,
            binarise=self.binarise,
            batched=self.batched,
        )

    def _tell(self, folder: Folder, tasks: Sequence[Any]) -> int:
        summary = folder.summary(tasks, self.trials)
        file = folder.save(summary)
        for name, row in summary["tasks"].items():
            print(f"{name}  {say_rate(row)}  {row['instruction']}")
        print(f"{self.suite}, {len(tasks)} tasks: {say_rate(summary['suite'])}; see {file}")
        return 0


def say_rate(row: Rate | dict[str, Any]) -> str:
    """Successes of trials, with an interval, and what went wrong besides."""
    odd = ", ".join(
        f"{count} {name}" for name, count in row["endings"].items() if count and name in ("timeout", "crash")
    )
    share = f"{row['successes']}/{row['trials']} = {100 * row['rate']:.1f} %"
    return f"{share} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]" + (f" ({odd})" if odd else "")


def open_policy(checkpoint: Path, device: str) -> Policy:
    """A policy that looks at LIBERO's cameras.

    Raises:
        SimForcingError: it is none, or has other cameras, states or actions.
    """
    from simforcing.model.device import pick_device
    from simforcing.policy.libero_check import camera_roles, unlike_recordings
    from simforcing.policy.libero_numbers import GRIPPER
    from simforcing.policy.policy import Policy
    from simforcing.policy.preparation import PolicyPreparation

    policy = Policy.from_pretrained(checkpoint)
    if not isinstance(policy.preparation, PolicyPreparation) or not policy.preparation.cameras:
        raise SimForcingError(f"{checkpoint}: does not say which cameras it looks at; train it with 'policy train'")
    camera_roles(list(policy.preparation.cameras))
    for what, found, wanted in (
        ("actions", policy.config.action_dim, GRIPPER + 1),
        ("states", policy.config.proprio_dim, 8),
    ):
        if found != wanted:
            raise SimForcingError(f"{checkpoint}: its {what} have {found} numbers, LIBERO's {wanted}")
    learnt = policy.preparation.action_stats
    if unlike := unlike_recordings(learnt.min, learnt.max):
        raise SimForcingError(f"{checkpoint}: learnt other actions than LIBERO's: {unlike}")
    return policy.to(pick_device(device)).eval()


def acting(policy: Policy, protocol: Protocol) -> Act:
    """The policy as trials ask it."""
    import numpy as np

    from simforcing.policy.libero_check import by_role, camera_roles
    from simforcing.policy.preparation import PolicyPreparation

    assert isinstance(policy.preparation, PolicyPreparation)
    roles = camera_roles(list(policy.preparation.cameras))

    def act(seen: Sequence[Seen], words: Sequence[str], seeds: Sequence[int]) -> np.ndarray:
        views = [by_role(one.images, roles) for one in seen]
        images = {key: np.stack([view[key] for view in views]) for key in roles}
        return policy.act(images, np.stack([one.state for one in seen]), words, list(seeds), protocol.denoising)

    return act


def try_out(act: Act, protocol: Protocol, tasks: Sequence[Task]) -> None:
    """Asks for actions once a task, of a black picture, before anything is claimed and counted.

    Raises:
        SimForcingError: the policy cannot answer: its codec or text encoder is not to be had, a picture has another
            shape, an instruction is too long.
    """
    import numpy as np

    from simforcing.policy.libero_check import NAMES
    from simforcing.policy.libero_env import Seen

    black = np.zeros((protocol.size, protocol.size, 3), np.uint8)
    seen = Seen(dict.fromkeys(NAMES, black), np.zeros(8, np.float32))
    for task in tasks:
        act([seen], [task.instruction], [0])
