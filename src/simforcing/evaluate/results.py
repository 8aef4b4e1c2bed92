"""Result files: every number of one model on one set of clips, a value a clip, with the protocol; and their comparison.

Legend: N clips, S seeds, K predicted frames.

A file is JSON. Values that are not defined are null there and nan here. Results of one name are the same method under
several seeds (of training or of noise); what is compared are names.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from simforcing.errors import SimForcingError
from simforcing.evaluate.metrics import METRICS
from simforcing.evaluate.protocol import METHOD, Protocol, check_same, mixed
from simforcing.evaluate.statistics import (
    Difference,
    Interval,
    bootstrap,
    difference_over_seeds,
    over_seeds,
    paired_ratio,
    ratio_over_seeds,
)
from simforcing.files import write_text

FORMAT = "simforcing-result-1"
Column = list[float]


@dataclass(frozen=True)
class Result:
    """One model, sampled in one way, on one set of clips.

    per_clip: metric -> a number a clip, predicted frames only; with_first_frame: the same with the given frame counted,
        for comparison with papers that do.
    whole: distances between the sets of clips (FID, FVD, ...); whole_with_first_frame likewise.
    unavailable: metric -> why it could not be measured.
    by_frame: metric -> a row a clip, a number a predicted frame.
    action: mean squared error of the predicted latents with the `true` and with `exchanged` actions, a number a clip.
    sensitivity: change of the actions -> `behaviour.Sensitivity` as a mapping.
    latency: stage -> seconds of each measurement, one clip at a time.
    windows: (episode, start) of each clip; videos: folder of the clips' videos beside the file, if they were kept.
    short_episodes: held-out episodes that are not in it, because they are shorter than a window.
    """

    name: str
    model: str
    model_sha256: str
    protocol: Protocol
    windows: Sequence[tuple[int, int]]
    tasks: Sequence[str]
    per_clip: Mapping[str, Column]
    with_first_frame: Mapping[str, Column] = field(default_factory=dict)
    whole: Mapping[str, float] = field(default_factory=dict)
    whole_with_first_frame: Mapping[str, float] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)
    by_frame: Mapping[str, Sequence[Column]] = field(default_factory=dict)
    action: Mapping[str, Column] = field(default_factory=dict)
    sensitivity: Mapping[str, Mapping[str, Column]] = field(default_factory=dict)
    latency: Mapping[str, Column] = field(default_factory=dict)
    videos: str | None = None
    short_episodes: Sequence[int] = ()

    @property
    def episodes(self) -> list[int]:
        """Of each clip: what intervals resample."""
        return [episode for episode, _ in self.windows]

    def intervals(self, first_frame: bool = False) -> dict[str, Interval]:
        """Every metric's mean with its interval; distances of sets have none."""
        columns, whole = (
            (self.with_first_frame, self.whole_with_first_frame) if first_frame else (self.per_clip, self.whole)
        )
        found = {key: bootstrap(values, clusters=self.episodes) for key, values in columns.items()}
        return found | {key: bare(value, len(self.windows)) for key, value in whole.items()}

    def action_ratio(self) -> Interval | None:
        """Error with exchanged actions over error with the true ones."""
        if not self.action:
            return None
        return paired_ratio(self.action["exchanged"], self.action["true"], clusters=self.episodes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the intervals for those who read the file."""
        stored = {f.name: getattr(self, f.name) for f in fields(self)}
        shown = {"metrics": self.intervals(), "metrics_with_first_frame": self.intervals(True)}
        ratio = self.action_ratio()
        found = {"format": FORMAT, **shown, "action_ratio": ratio, **stored, "protocol": self.protocol.to_dict()}
        plain: dict[str, Any] = _plain(found)
        return plain

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        write_text(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Result":
        """Reads a file of `save`.

        Raises:
            SimForcingError: it is none, or of another version.
        """
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SimForcingError(f"{path}: cannot read the result ({error.strerror})") from error
        except ValueError as error:
            raise SimForcingError(f"{path}: no result file ({error})") from error
        if not is_result(stored):
            raise SimForcingError(f"{path}: no result file of this version; write one with 'simforcing evaluate'")
        try:
            # Files from before there was such a list say nothing about it.
            absent = {"protocol", *({"short_episodes"} - set(stored))}
            values = {f.name: _restored(stored[f.name]) for f in fields(cls) if f.name not in absent}
            values["windows"] = [(int(e), int(s)) for e, s in stored["windows"]]
            return cls(protocol=Protocol.from_dict(stored["protocol"]), **values)
        except (KeyError, TypeError, ValueError) as error:
            raise SimForcingError(f"{path}: a damaged result file ({error}); evaluate again") from error


def is_result(stored: Any) -> bool:
    """Whether a JSON value is what `Result.save` writes."""
    return isinstance(stored, dict) and stored.get("format") == FORMAT


def bare(value: float, clips: int) -> Interval:
    """A number of a whole set of clips, which has no interval: resampled sets are biased."""
    return Interval(mean=value, low=math.nan, high=math.nan, clips=clips, missing=0)


@dataclass(frozen=True)
class Comparison:
    """Several methods on the same clips; `notes` say in what they were not measured alike, where that was allowed."""

    methods: Mapping[str, Sequence[Result]]
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, results: Sequence[Result], allow: Collection[str] = ()) -> "Comparison":
        """Groups results by name.

        Raises:
            SimForcingError: there is none, or they differ in more than their method (and, within a name, the noise
                seed), and not in `allow`; names the field.
        """
        if not results:
            raise SimForcingError("no results to compare; write some with 'simforcing evaluate'")
        methods: dict[str, list[Result]] = {}
        for result in results:
            methods.setdefault(result.name, []).append(result)
        for name, group in methods.items():
            same = {f"{name} ({i})": r.protocol for i, r in enumerate(group)}
            check_same(same, {"seed", *allow})
            twice = {(r.model_sha256, r.protocol.seed) for r in group}
            if len(twice) < len(group):
                raise SimForcingError(f"two results named '{name}' are of the same model and seed; keep one")
        firsts = {name: group[0].protocol for name, group in methods.items()}
        repeated = {"seed"} if any(len(g) > 1 for g in methods.values()) else set()
        check_same(firsts, {*METHOD, *allow, *repeated})
        all_of_them = {f"{n} ({i})" if i else n: r.protocol for n, g in methods.items() for i, r in enumerate(g)}
        return cls(methods, mixed(all_of_them, sorted(allow)))

    @property
    def episodes(self) -> list[int]:
        """Of each clip."""
        return next(iter(self.methods.values()))[0].episodes

    def table(self, name: str, key: str, first_frame: bool = False) -> Float64[np.ndarray, "S N"] | None:
        """One metric of one method, a row a seed; None where a seed lacks it. first_frame: counted with that, too."""
        columns = [(r.with_first_frame if first_frame else r.per_clip).get(key) for r in self.methods[name]]
        return None if any(c is None for c in columns) else np.array(columns, np.float64)

    def rows_with_first_frame(self) -> dict[str, dict[str, Interval]]:
        """The same of what is counted with the given first frame, as papers do; methods without it are left out."""
        found: dict[str, dict[str, Interval]] = {}
        for name in self.methods:
            tables = {key: self.table(name, key, True) for key in METRICS}
            row = {k: over_seeds(t, clusters=self.episodes) for k, t in tables.items() if t is not None}
            found |= {name: row} if row else {}
        return found

    def rows(self) -> dict[str, dict[str, Interval]]:
        """Every metric of every method, over clips and seeds."""
        found: dict[str, dict[str, Interval]] = {}
        for name, group in self.methods.items():
            found[name] = {}
            for key in METRICS:
                table = self.table(name, key)
                if table is not None:
                    found[name][key] = over_seeds(table, clusters=self.episodes)
                elif all(key in r.whole for r in group):
                    mean = float(np.mean([r.whole[key] for r in group]))
                    found[name][key] = bare(mean, len(self.episodes))
        return found

    def differences(self, name: str, keys: Sequence[str] = ("psnr_moving", "psnr", "ssim")) -> list[Difference]:
        """`name` against every other method, clip by clip."""
        found = []
        for other in self.methods:
            for key in keys:
                a, b = self.table(name, key), self.table(other, key)
                if other != name and a is not None and b is not None:
                    found.append(
                        difference_over_seeds(a, b, name_a=name, name_b=other, metric=key, clusters=self.episodes)
                    )
        return found

    def frames(self, name: str, key: str) -> list[Interval] | None:
        """A metric of `by_frame` against the frame's index, over clips and seeds."""
        tables = [r.by_frame.get(key) for r in self.methods[name]]
        if any(t is None for t in tables):
            return None
        values = np.array(tables, np.float64)  # S N F
        return [over_seeds(values[:, :, frame], clusters=self.episodes) for frame in range(values.shape[2])]

    def action_ratios(self) -> dict[str, Interval]:
        """Of every method that has one, over clips and seeds."""
        found = {}
        for name, group in self.methods.items():
            if all(r.action for r in group):
                wrong, right = (np.array([r.action[k] for r in group], np.float64) for k in ("exchanged", "true"))
                found[name] = ratio_over_seeds(wrong, right, clusters=self.episodes)
        return found

    def unavailable(self) -> dict[str, str]:
        """Metrics that some result lacks, and why."""
        return {k: why for group in self.methods.values() for r in group for k, why in r.unavailable.items()}


def _plain(value: Any) -> Any:
    """For JSON: nan is null, tuples and arrays are lists."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 8)
    return value


def _restored(value: Any) -> Any:
    """Inverse of `_plain` inside columns: null is nan."""
    if isinstance(value, dict):
        return {k: _restored(v) for k, v in value.items()}
    if isinstance(value, list):
        return [math.nan if v is None else _restored(v) for v in value]
    return value
