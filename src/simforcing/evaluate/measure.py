"""Measures one model, sampled in one way, on a set of clips: everything that a result file holds.

Legend: N clips, T frames, C F h w latents.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Float64, UInt8
from torch import Tensor, nn

from simforcing.errors import SimForcingError
from simforcing.evaluate import behaviour, metrics
from simforcing.evaluate.clips import EvaluationClips
from simforcing.evaluate.perceptual import Perceptual
from simforcing.evaluate.protocol import Protocol, hash_clips
from simforcing.evaluate.results import Result
from simforcing.predict.predictor import Predictor, Start
from simforcing.predict.sampler import Guidance, SamplerConfig, Solver

Control = Literal["", "copy", "codec", "exchanged-actions", "other-simulation", "corrupted-simulation"]
CORRUPTED = (0.7, 0.2)
"""Keep and noise of a simulation corrupted on purpose: z' = keep z + (1 - keep) noise e, in the middle of what training
draws from (see `ObjectiveConfig`)."""
Made = TypeVar("Made")
Report = Callable[[str, float], None]


@dataclass(frozen=True)
class Way:
    """How a model is sampled. With w = 0 neither the simulation nor its steps matter.

    control: what is spoilt on purpose: `copy` and `codec` (the codec's own reconstruction) replace the prediction;
        `exchanged-actions` gives each clip those of another episode, in both stages; `other-simulation` the simulation
        of another episode's clip; `corrupted-simulation` shrinks it and adds noise (`CORRUPTED`).
    noise: noise levels at which the simulation is followed.
    """

    w: float = 0.6
    sim_steps: int = 1
    real_steps: int = 10
    kind: Literal["branches", "soft"] = "branches"
    control: Control = ""
    seed: int = 0
    noise: tuple[float, float] = (0.0, 1.0)
    solver: Solver = "euler"

    @property
    def guidance(self) -> Guidance:
        """For the sampler."""
        return Guidance(self.w, self.kind, noise=self.noise)

    @property
    def config(self) -> SamplerConfig:
        """For the sampler of the real stage."""
        return SamplerConfig(solver=self.solver)

    @property
    def how(self) -> str:
        """Kind of guidance, and in what the way departs from the paper's."""
        low, high = self.noise
        part = "" if (low, high) == (0.0, 1.0) else f" at noise {low:g} to {high:g}"
        return f"{self.kind}{part}" + ("" if self.solver == "euler" else f", {self.solver}")

    @property
    def samples(self) -> bool:
        """Whether the model is run at all."""
        return self.control not in ("copy", "codec")

    @property
    def simulates(self) -> bool:
        """Whether a simulation is looked at."""
        return self.samples and self.w != 0


@dataclass
class Rollouts:
    """A model on clips. Predicted simulation is kept: it depends on its steps and the seed alone.

    simulator: who predicts the simulation; None takes the rendered one.
    """

    predictor: Predictor
    clips: EvaluationClips
    simulator: Predictor | None
    _sim: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @cached_property
    def model_sha256(self) -> str:
        """Hash of the model's weights."""
        return weights_hash(self.predictor.model)

    @cached_property
    def simulator_sha256(self) -> str:
        """Hash of the weights that predict the simulation; empty where the model itself does, or nothing."""
        if self.simulator is None or self.simulator is self.predictor:
            return ""
        return weights_hash(self.simulator.model)

    def start(self, way: Way) -> Start:
        """What the model is given."""
        begin = self.clips.begin(way.seed)
        return begin.with_actions_of(self.clips.others()) if way.control == "exchanged-actions" else begin

    def simulation(self, way: Way, start: Start | None = None) -> Float[Tensor, "N C F h w"] | None:
        """Simulation latents that the real stage sees; None where it sees none. Only the usual start's are kept."""
        if not way.simulates:
            return None
        key = (0 if self.simulator is None else way.sim_steps, way.seed)
        usual = start is None and way.control != "exchanged-actions"
        if not usual or key not in self._sim:
            given = self.start(way) if start is None else start
            sim = (
                self.predictor.encode(self.clips.sim)
                if self.simulator is None
                else self.simulator.simulation(given, way.sim_steps)
            )
            if not usual:
                return self._spoilt(sim, way)
            self._sim[key] = sim
        return self._spoilt(self._sim[key], way)

    def _spoilt(self, sim: Tensor, way: Way) -> Tensor:
        if way.control == "other-simulation":
            return sim[torch.from_numpy(self.clips.others()).to(sim.device)]
        if way.control == "corrupted-simulation":
            keep, noise = CORRUPTED
            e = torch.randn(sim.shape, generator=torch.Generator().manual_seed(way.seed)).to(sim)
            return keep * sim + (1 - keep) * noise * e
        return sim

    def real(self, way: Way, start: Start | None = None) -> Float[Tensor, "N C F h w"]:
        """Predicted real latents; `start` replaces the usual one in both stages."""
        given = self.start(way) if start is None else start
        return self.predictor.real(given, way.real_steps, self.simulation(way, start), way.guidance, way.config)

    def video(self, way: Way) -> tuple[UInt8[np.ndarray, "N T H W 3"], Tensor | None]:
        """The video, and its latents where a model made them."""
        if way.control == "copy":
            return np.repeat(self.clips.real[:, :1], self.clips.real.shape[1], axis=1), None
        if way.control == "codec":
            return self.predictor.decode(self.predictor.encode(self.clips.real)), None
        latents = self.real(way)
        return self.predictor.decode(latents), latents

    def latency(self, way: Way, repeats: int = 3) -> dict[str, list[float]]:
        """Seconds of each stage that the way needs, the first clip by itself, after one run that is not timed.

        Encoding of the first frame and of the text counts with the stage that asks for it; the rendered simulation is
        encoded, not rendered.
        """
        if not way.samples:
            return {}
        one = self.clips.begin(way.seed).part(slice(0, 1))
        found: dict[str, list[float]] = {}
        for turn in range(repeats + 1):
            sim = None
            if way.simulates:
                sim, seconds = _timed(partial(self._one_simulation, one, way))
                found.setdefault("simulation stage", []).append(seconds)
            real = partial(self.predictor.real, one, way.real_steps, sim, way.guidance, way.config)
            latents, seconds = _timed(real)
            found.setdefault("real stage", []).append(seconds)
            _, seconds = _timed(partial(self.predictor.decode, latents))
            found.setdefault("decoding", []).append(seconds)
            if turn == 0:
                found = {}
        return found

    def _one_simulation(self, one: Start, way: Way) -> Tensor:
        if self.simulator is None:
            return self.predictor.encode(self.clips.sim[:1])
        return self.simulator.simulation(one, way.sim_steps)


def _timed(work: Callable[[], Made]) -> tuple[Made, float]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    found = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, time.perf_counter() - began


@dataclass(frozen=True)
class Wanted:
    """What is measured besides the metrics of two videos.

    perceptual: metrics with a network; None leaves them out, which the result says.
    changes: of the actions, see `behaviour.CHANGES`; the action ratio needs `other`.
    repeats: of the latency; 0 leaves it out.
    """

    perceptual: Perceptual | None = None
    first_frame: bool = True
    changes: tuple[str, ...] = behaviour.CHANGES
    repeats: int = 3


@dataclass(frozen=True)
class Measured:
    """A result, and what was predicted: real video, and simulation where one was looked at."""

    result: Result
    video: UInt8[np.ndarray, "N T H W 3"]
    simulation: UInt8[np.ndarray, "N T H W 3"] | None


def measure(
    rollouts: Rollouts,
    way: Way,
    wanted: Wanted,
    *,
    name: str,
    model: str,
    simulation: str,
    split_sha256: str,
    report: Report = lambda words, share: None,
) -> Measured:
    """Predicts all clips, scores them, changes their actions, times the stages."""
    clips = rollouts.clips
    report("predicting", 0.0)
    video, latents = rollouts.video(way)
    report("scoring", 0.3)
    per_clip: dict[str, Float64[np.ndarray, " N"]] = metrics.score(video, clips.real, keys=metrics.PIXEL)
    motion = behaviour.motion_accuracy(video, clips.real, behaviour.arm_masks(clips.sim))
    per_clip |= {"arm_track": motion.track, "arm_overlap": motion.overlap}
    looked = wanted.perceptual.measure(video, clips.real) if wanted.perceptual else ({}, {}, {})
    with_first: tuple[Mapping[str, np.ndarray], Mapping[str, float]] = ({}, {})
    if wanted.first_frame:
        again = wanted.perceptual.measure(video, clips.real, first_frame=True) if wanted.perceptual else ({}, {}, {})
        papers = metrics.score(video, clips.real, first_frame=True, keys=("psnr", "ssim"))
        with_first = (papers | again[0], again[1])
    report("changing actions", 0.5)
    action, sensitive = _actions(rollouts, way, wanted.changes, video, latents)
    report("timing", 0.9)
    result = Result(
        name=name,
        model=model,
        model_sha256=rollouts.model_sha256,
        protocol=protocol_of(rollouts, way, wanted, simulation, split_sha256),
        windows=clips.window_names(),
        short_episodes=list(clips.short),
        tasks=list(clips.tasks),
        per_clip=_columns(per_clip | looked[0]),
        with_first_frame=_columns(with_first[0]),
        whole=looked[1],
        whole_with_first_frame=with_first[1],
        unavailable=looked[2],
        by_frame={
            "psnr": metrics.psnr_by_frame(video, clips.real).tolist(),
            "colour_drift": metrics.colour_drift_by_frame(video, clips.real).tolist(),
        },
        action=action,
        sensitivity=sensitive,
        latency=rollouts.latency(way, wanted.repeats) if wanted.repeats else {},
    )
    sim = rollouts.simulation(way)
    report("done", 1.0)
    return Measured(result, video, None if sim is None else rollouts.predictor.decode(sim))


def _actions(
    rollouts: Rollouts,
    way: Way,
    changes: tuple[str, ...],
    video: UInt8[np.ndarray, "N T H W 3"],
    latents: Tensor | None,
) -> tuple[dict[str, list[float]], dict[str, dict[str, list[float]]]]:
    """Errors with true and exchanged actions, and the sensitivity to each change."""
    clips = rollouts.clips
    if latents is None or way.control or not changes:
        return {}, {}
    if unknown := set(changes) - set(behaviour.CHANGES):
        raise SimForcingError(f"no change of actions '{min(unknown)}'; known: {', '.join(behaviour.CHANGES)}")
    others = clips.others()
    convention = rollouts.predictor.preparation.action
    actions = behaviour.changed_actions(clips.action, convention, others, way.seed)
    where = behaviour.places(clips.real, others)
    begin, truth = clips.begin(way.seed), rollouts.predictor.encode(clips.real)
    errors: dict[str, list[float]] = {}
    found: dict[str, dict[str, list[float]]] = {}
    for change in changes:
        changed = rollouts.real(way, _with_actions(begin, actions[change]))
        found[change] = behaviour.sensitivity(rollouts.predictor.decode(changed), video, where[change]).to_dict()
        if change == "other":
            errors = {"true": _error(latents, truth), "exchanged": _error(changed, truth)}
    return errors, found


def _with_actions(start: Start, action: np.ndarray) -> Start:
    return Start(start.real_first, action, start.proprio, start.tasks, start.sim_first, start.seeds)


def _error(latents: Tensor, truth: Tensor) -> list[float]:
    found: list[float] = (latents - truth)[:, :, 1:].square().flatten(1).mean(1).double().tolist()
    return found


def _columns(values: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    return {key: [float(v) for v in column] for key, column in values.items()}


def protocol_of(rollouts: Rollouts, way: Way, wanted: Wanted, simulation: str, split_sha256: str) -> Protocol:
    """Under what conditions `measure` measures; fields that a way has no use for are None."""
    clips = rollouts.clips
    looked = wanted.perceptual
    keys = [k for k in metrics.METRICS if k not in ("lpips_alex", "lpips_vgg", "fid", "fvd", "frechet_codec")]
    networks = dict(looked.hashes()) if looked else {}
    keys += list(looked.available()) if looked else []
    return Protocol(
        split_sha256=split_sha256,
        clips_sha256=hash_clips(clips.window_names()),
        clips=len(clips),
        frames=clips.real.shape[1],
        fps=clips.fps,
        height=clips.real.shape[2],
        width=clips.real.shape[3],
        sim_steps=way.sim_steps if way.simulates and rollouts.simulator is not None else None,
        real_steps=way.real_steps if way.samples else None,
        guidance=way.w if way.samples else None,
        guidance_kind=way.how,
        seed=way.seed,
        simulation=simulation if way.simulates else "",
        simulator_sha256=rollouts.simulator_sha256 if way.simulates else "",
        control=way.control,
        metrics=metrics.definitions(keys),
        networks=networks,
    )


def weights_hash(model: nn.Module) -> str:
    """sha256 over the names and bytes of all weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def split_hash(path: Path) -> str:
    """sha256 of a split file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
