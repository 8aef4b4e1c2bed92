"""A folder of trials on LIBERO: one file a trial, belonging to one policy and one protocol, and what they add up to.

`run.json` says whose trials they are, `trials/<task>/<number>.json` how each ended, `videos/` what was seen,
`results.json` the rates. Trials of another policy, protocol or simulation are refused, never averaged.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from simforcing.errors import SimForcingError
from simforcing.files import partial_path, write_text
from simforcing.policy.libero_env import Task
from simforcing.policy.libero_trials import Ending, Job, Outcome, Protocol, keep_video
from simforcing.train.directory import claim_run

FORMAT = "simforcing-libero-trial-1"
ENDINGS: tuple[Ending, ...] = ("success", "limit", "timeout", "crash")
UNUSUAL: tuple[Ending, ...] = ("timeout", "crash")
Z95 = 1.959963984540054


class Rate(TypedDict):
    """Successes of trials, with a Wilson interval at 95 %; how the trials ended."""

    successes: int
    trials: int
    rate: float
    low: float
    high: float
    endings: dict[str, int]


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Bounds of a success rate at 95 % (Wilson, 1927). Raises SimForcingError without trials."""
    if not 0 <= successes <= trials or trials < 1:
        raise SimForcingError(f"{successes} successes of {trials} trials: an interval needs at least one trial")
    share, z2 = successes / trials, Z95 * Z95
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    return middle - half if successes else 0.0, middle + half if successes < trials else 1.0


def rate(endings: Sequence[str]) -> Rate:
    """What trials that ended like this add up to; whatever is no success is a failure."""
    counts = Counter(endings)
    low, high = wilson(counts["success"], len(endings))
    return Rate(
        successes=counts["success"],
        trials=len(endings),
        rate=counts["success"] / len(endings),
        low=low,
        high=high,
        endings={name: counts[name] for name in ENDINGS},
    )


@dataclass(frozen=True)
class Folder:
    """The trials of one policy under one protocol. `policy`: its name, for people; it is known by its hash."""

    out: Path
    policy: str
    policy_sha256: str
    protocol: Protocol

    def claim(self) -> None:
        """Makes the folder, or recognises it as this policy's and protocol's; it is then this process's.

        Raises:
            SimForcingError: it belongs to another policy or protocol, or another process works on it.
        """
        wanted = {"policy_sha256": self.policy_sha256, "protocol": asdict(self.protocol)}
        claim_run(self.out, {"kind": "policy evaluation", **wanted})

    def file(self, task: Task, trial: int) -> Path:
        """Where a trial is kept."""
        return self.out / "trials" / task.name / f"{trial:03d}.json"

    def job(self, task: Task, trial: int, video: bool) -> Job:
        """A trial to do."""
        path = self.out / "videos" / f"{task.name}-{trial:03d}.mp4" if video else None
        return Job(task, trial, path)

    def read(self, task: Task, trial: int) -> dict[str, Any] | None:
        """A trial that was done; None where there is none.

        Raises:
            SimForcingError: the file is damaged, or of another policy or protocol.
        """
        file = self.file(task, trial)
        if not file.exists():
            return None
        try:
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            wanted = self._owner(task, trial)
            differs = [name for name, value in wanted.items() if found[name] != value]
            if found["ending"] not in ENDINGS:
                raise ValueError(f"ending {found['ending']!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise SimForcingError(f"{file}: a damaged trial ({error}); delete it to run it again") from error
        if differs:
            raise SimForcingError(
                f"{file}: a trial of another {', '.join(differs)}; choose another --out, or delete it"
            )
        return found

    def _owner(self, task: Task, trial: int) -> dict[str, Any]:
        hashes = {"policy_sha256": self.policy_sha256, "protocol_sha256": self.protocol.sha256}
        return {"format": FORMAT, **hashes, "suite": task.suite, "task": task.index, "trial": trial}

    def write(self, job: Job, outcome: Outcome, videos: int) -> dict[str, Any]:
        """Keeps a trial that was done, and its video while its task has fewer than `videos` of that ending."""
        video = job.video and self._video(job, outcome.ending)
        if video is not None and len(list(video.parent.glob(f"{job.task.name}-*-{outcome.ending}.mp4"))) >= videos:
            video = None
        if job.video is not None and not keep_video(outcome, video):
            video = None
            partial_path(job.video)  # what a process that died left of it
        record = self._owner(job.task, job.trial) | {
            "instruction": job.task.instruction,
            "ending": outcome.ending,
            "steps": outcome.steps,
            "chunks": outcome.chunks,
            "seconds": round(outcome.seconds, 3),
            "error": outcome.error,
            "video": video and video.relative_to(self.out).as_posix(),
            "fingerprint": outcome.fingerprint,
        }
        file = self.file(job.task, job.trial)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(record, indent=1) + "\n")
        return record

    def _video(self, job: Job, ending: Ending) -> Path:
        return self.out / "videos" / f"{job.task.name}-{job.trial:03d}-{ending}.mp4"

    def summary(self, tasks: Sequence[Task], trials: int) -> dict[str, Any]:
        """Rates of tasks and suite (all trials of all tasks), of exactly the trials asked for.

        Raises:
            SimForcingError: one is missing, or they were simulated by different means.
        """
        records: dict[str, list[dict[str, Any]]] = {}
        for task in tasks:
            found = [self.read(task, trial) for trial in range(trials)]
            missing = [str(trial) for trial, record in enumerate(found) if record is None]
            if missing:
                raise SimForcingError(f"{self.out}: {task.name} lacks trial {', '.join(missing)}; run them first")
            records[task.name] = [record for record in found if record is not None]
        every = [record for group in records.values() for record in group]
        shared = common_fingerprint({f"{r['suite']}-{r['task']:02d} trial {r['trial']}": r for r in every})
        return {
            "policy": self.policy,
            "policy_sha256": self.policy_sha256,
            "protocol": asdict(self.protocol),
            "protocol_sha256": self.protocol.sha256,
            "fingerprint": shared,
            "suite": rate([record["ending"] for record in every]),
            "tasks": {
                name: {"instruction": group[0]["instruction"], **rate([record["ending"] for record in group])}
                for name, group in records.items()
            },
        }

    def save(self, summary: Mapping[str, Any]) -> Path:
        """Writes `results.json`; replaces one of fewer or more trials."""
        file = self.out / "results.json"
        write_text(file, json.dumps(summary, indent=1, allow_nan=False) + "\n")
        return file


def common_fingerprint(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What all trials were simulated by; the hash of a task's files is one a task. Crashed ones may have none.

    Raises:
        SimForcingError: two differ; names both and what differs.
    """
    shared: dict[str, str] = {}
    files: dict[str, str] = {}
    first: dict[str, str] = {}  # key -> the trial that it was first met in
    for name, record in records.items():
        found = dict(record["fingerprint"])
        key = f"{record['suite']}-{record['task']:02d}"
        own = {key: found.pop("task")} if "task" in found else {}
        for where, values in ((files, own), (shared, found)):
            for entry, value in values.items():
                first.setdefault(entry, name)
                if where.setdefault(entry, value) != value:
                    raise SimForcingError(
                        f"trials were simulated by different means and are not averaged: {entry} is "
                        f"{where[entry]!r} in {first[entry]}, {value!r} in {name}; run them again in another --out"
                    )
    return {**shared, "tasks": files}
