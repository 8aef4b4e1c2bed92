"""`simforcing evaluate`: numbers of one model, with their protocol."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from simforcing.cli.sampling import Sampling, check_dataset, check_targets
from simforcing.errors import SimForcingError

if TYPE_CHECKING:
    from simforcing.data.episode import Dataset
    from simforcing.evaluate.measure import Measured, Rollouts
    from simforcing.evaluate.networks import Networks
    from simforcing.evaluate.perceptual import Perceptual
    from simforcing.predict.predictor import Predictor


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Where metrics with a network find its weights."""

    networks: Path | None = None
    """Folder of the networks' weights (LPIPS, FID, FVD); default: ~/.cache/simforcing/networks, filled on first use."""
    network: tuple[str, ...] = ()
    """Weights of one network by path, as NAME=FILE: alexnet, vgg16, lpips-alex, lpips-vgg, inception, i3d."""
    download: bool = True
    """Fetch missing weights from their usual address; where that fails the metric is reported as unavailable."""

    def find_networks(self) -> "Networks":
        """Where weights are looked for.

        Raises:
            SimForcingError: a path that was given is wrong.
        """
        from simforcing.evaluate.networks import Networks, default_directory

        paths = {}
        for given in self.network:
            name, _, path = given.partition("=")
            if not path:
                raise SimForcingError(f"--network {given}: give NAME=FILE, e.g. i3d=weights/i3d_torchscript.pt")
            paths[name] = Path(path)
        if self.networks is not None and not self.networks.is_dir():
            raise SimForcingError(f"--networks: there is no folder {self.networks}")
        return Networks(self.networks or default_directory(), paths, self.download)

    def perceptual(self, predictor: "Predictor") -> "Perceptual":
        """The metrics with a network, and the stand-in by the predictor's codec."""
        from simforcing.evaluate.perceptual import Perceptual

        return Perceptual(self.find_networks(), predictor.codec, str(predictor.model.device))


@dataclass(frozen=True)
class Evaluate(NetworkOptions, Sampling):
    """Score a model's predictions on a dataset, a number a clip, with intervals, latency and the whole protocol.

    Predicted frames only (PSNR, SSIM, LPIPS, FVD once more with the first frame, for comparison with papers); intervals
    resample whole episodes. Also: does the video follow the actions, is the arm in the right place, do colours drift.
    Give the episodes that the model has not seen: with --split, those of its part 'test'. Results of one --name are
    seeds of one method to 'simforcing report'.

    Example:
      simforcing evaluate runs/student/model --data data/pairs --split runs/latents/split.json --out results/ours.json
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Model directory ('bundled-student', 'bundled-teacher': those that ship)."""
    data: Path
    """Paired dataset."""
    split: Path
    """Split file that `encode` wrote."""
    out: Path
    """JSON file to write; must not exist."""
    name: str | None = None
    """What tables call this method; default: the name of the file."""
    part: Literal["val", "test"] = "test"
    """Which episodes of the split."""
    per_episode: int = 1
    """Windows of each episode."""
    control: Literal["", "copy", "codec", "exchanged-actions", "other-simulation", "corrupted-simulation"] = ""
    """Something spoilt on purpose, to compare with: the first frame copied, the codec's reconstruction of the truth,
    another episode's actions, another clip's simulation, a noisy simulation."""
    sensitivity: bool = True
    """Also predict under zero, negated, shuffled and exchanged actions: four more rollouts a clip; without it only
    under exchanged ones, for the action ratio."""
    videos: bool = True
    """Keep every clip's videos in a folder beside the file, for 'simforcing report'."""

    def run(self) -> int:
        """Predicts, scores, writes."""
        from simforcing.cli.show import progress
        from simforcing.data import open_dataset
        from simforcing.evaluate.clips import evaluation_clips, held_out
        from simforcing.evaluate.measure import Rollouts, Wanted, Way, measure, split_hash
        from simforcing.predict.predictor import Predictor

        folder = self.out.with_suffix(".videos")
        check_targets(self.out, *([folder] if self.videos else []))
        self.find_networks()
        way = Way(
            self.w,
            self.sim_steps,
            self.real_steps,
            self.guidance_kind,
            self.control,
            self.seed,
            self.guided_noise,
            self.solver,
        )
        predictor, dataset = Predictor(self.open(self.checkpoint, guided=way.samples)), open_dataset(self.data)
        check_dataset(predictor, dataset, self.checkpoint)
        rule = predictor.preparation.rule
        clips = evaluation_clips(dataset, rule, held_out(dataset, self.split, self.part), self.per_episode)
        if clips.short:
            print(clips.left_out)
        rollouts = Rollouts(predictor, clips, self.simulator(predictor, dataset))
        changes = Wanted().changes if self.sensitivity else ("other",)
        wanted = Wanted(self.perceptual(predictor), changes=changes)
        with progress() as report:
            found = measure(
                rollouts,
                way,
                wanted,
                name=self.name or self.out.stem,
                model=str(self.checkpoint),
                simulation=self.source,
                split_sha256=split_hash(self.split),
                report=lambda words, share: report("evaluating", share, words),
            )
        self._write(found, rollouts, folder)
        _show(found)
        return 0

    def simulator(self, predictor: "Predictor", dataset: "Dataset") -> "Predictor | None":
        """Who predicts the simulation; None for the rendered one.

        Raises:
            SimForcingError: --sim-model means something else by its actions.
        """
        from simforcing.predict.predictor import Predictor

        if self.simulation == "rendered":
            return None
        if self.sim_model is None or self.w == 0:
            return predictor
        other = Predictor(self.open(self.sim_model, guided=False), predictor.codec)
        check_dataset(other, dataset, self.sim_model)
        return other

    def _write(self, found: "Measured", rollouts: "Rollouts", folder: Path) -> None:
        from dataclasses import replace

        from simforcing.evaluate.gallery import save_videos

        result = found.result
        if self.videos:
            save_videos(folder, rollouts.clips, found.video, found.simulation)
            result = replace(result, videos=folder.name)
        result.save(self.out)


def _show(found: "Measured") -> None:
    """The numbers, one a line."""
    from simforcing.evaluate.metrics import METRICS
    from simforcing.evaluate.report.wording import with_interval

    result = found.result
    for key, value in result.intervals().items():
        metric = METRICS[key]
        print(f"{metric.label}: {with_interval(value, metric.digits, metric.unit)}")
    ratio = result.action_ratio()
    if ratio is not None:
        print(f"Action ratio: {with_interval(ratio, 2)}")
    if result.latency:
        stages = ", ".join(f"{name} {sorted(s)[len(s) // 2]:.3f} s" for name, s in result.latency.items())
        print(f"Latency of one clip: {stages}")
    for key, why in result.unavailable.items():
        print(f"{METRICS[key].label}: unavailable ({why})")
