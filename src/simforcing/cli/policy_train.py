"""`simforcing policy train`: a policy from demonstrations, from scratch or from a world model."""

import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from simforcing.cli.training import TrainingOptions
from simforcing.errors import SimForcingError, check_seed

if TYPE_CHECKING:
    import torch

    from simforcing.data.episode import Dataset
    from simforcing.model.world_model import WorldModel
    from simforcing.policy.data import PolicyData
    from simforcing.policy.objective import PolicyObjective
    from simforcing.policy.policy import Policy, Variant
    from simforcing.policy.recipe import PolicyRecipe
    from simforcing.policy.source import Start
    from simforcing.policy.start import Source, StartReport
    from simforcing.policy.windows import PolicyWindows
    from simforcing.train.config import TrainConfig


@dataclass(frozen=True)
class PolicyTrain(TrainingOptions):
    """Train a policy on demonstrations: from scratch, or with the experts of a video model or world model.

    Pictures are encoded first, to OUT/latents or to --latents, which several runs may share. Resumes by itself from
    OUT; a run of another configuration or other data there is refused. SIGTERM saves and stops. The result is
    OUT/model; OUT/start.json says of every tensor what it started as, OUT/split.json which episodes were held out.
    Several GPUs: encode with --encode-only, then start the same command without it by torchrun.

    Example:
      simforcing policy train data/demos --recipe policy-tiny --from runs/student/model --out runs/policy
      simforcing policy train data/demos --setting action-only --from none --latents runs/latents --out runs/scratch
    """

    data: Annotated[Path, tyro.conf.Positional]
    """Dataset of demonstrations, LeRobot or any other known format."""
    recipe: str = "policy-tiny"
    """Sizes and optimisation: policy-tiny or policy-libero."""
    setting: Literal["action-only", "unconditional", "video-action"] = "unconditional"
    """action-only: the video expert is frozen; unconditional: video and actions, which see the first frame only;
    video-action: actions see all of the video."""
    variant: Literal["first-frame", "joint", "idm"] | None = None
    """What actions see; default the setting's: first-frame, in video-action joint."""
    start: Annotated[str, tyro.conf.arg(name="from")] = "none"
    """none, a model directory, one with its kind before it (base:DIR, teacher:DIR, student:DIR, baseline:DIR), or
    bundled-teacher or bundled-student."""
    action_from: Literal["source", "video", "nothing"] | None = None
    """What the action expert starts as: the source's, its video expert resized, or nothing; default source, of a base
    video model video."""
    cameras: tuple[str, ...] = ()
    """Cameras that it looks at, from left to right; default all, where there are one or two (of LIBERO the agent view
    is on the left)."""
    latents: Path | None = None
    """Where encoded pictures are, or are to be; default OUT/latents."""
    encode_only: bool = False
    """Stop when the latents are there; those that are there already are checked."""
    every: int | None = None
    """Rows between the starts of windows; default the recipe's."""
    after_end: Literal["still", "last"] | None = None
    """Beyond the end of an episode: still, a change of nothing, or the last action again; default by what actions
    mean."""
    val: int | None = None
    """Episodes that are held out; default a tenth, at least one."""
    split_seed: int = 0
    """Which episodes are held out follows from it."""
    validate_every: int | None = None
    """Steps between validations, besides those that --set training.validate_seconds sets apart in time."""
    skip_bad: bool = False
    """Leave out damaged episodes; without it they are an error."""
    workers: int = 1
    """Processes that encode at once."""
    codec: str | None = None
    """Codec, where the recipe's does not come with the package."""
    text: str | None = None
    """Text encoder, likewise; also to use that of the model to start from, such as minilm."""

    def train(self, device: "torch.device") -> int:
        """See `TrainingOptions.train`."""
        from simforcing.data.audit import open_checked
        from simforcing.model.codec import load_codec
        from simforcing.policy.data import PolicyData, checked_split
        from simforcing.policy.source import Start
        from simforcing.train.encode import divided

        check_seed(self.split_seed, "--split-seed")
        found, config, objective = self._configuration()
        start, compute = Start.parse(self.start), self.compute(device)
        dataset = open_checked(self.data, skip_bad=self.skip_bad, video=False)
        doubt(dataset)
        content = self._content(dataset, found)
        header = content.header(dataset, load_codec(found.codec))
        if self.encode_only:
            self._encode(dataset, content, found, device)
            print(f"{self._latents}: complete")
            return 0
        split = divided(dataset, content, val=self.val, seed=self.split_seed)
        checked_split(split, self.data)
        kind, source = start.open()  # first: of a model of the hub, there are weights to describe only then
        description = self._description(found, config, objective, start, header, split, compute)
        self._ready(dataset, content, found, device, description)
        data = PolicyData(self._latents, header, split)
        policy, report = self._policy(found, data, kind, source, start.place, objective)
        return self._train(policy, report, config, objective, data, compute, device, description)

    def _train(
        self,
        policy: "Policy",
        report: "StartReport",
        config: "TrainConfig",
        objective: "PolicyObjective",
        data: "PolicyData",
        compute: "torch.dtype",
        device: "torch.device",
        description: dict[str, Any],
    ) -> int:
        from simforcing.data.windows import save_split
        from simforcing.policy.preparation import PolicyPreparation
        from simforcing.policy.settings import PolicyLoss
        from simforcing.policy.validate import validation
        from simforcing.train.directory import claim_run
        from simforcing.train.loop import Run
        from simforcing.train.parallel import Arrangement, assembled

        assert isinstance(policy.preparation, PolicyPreparation)
        first_alone = policy.config.variant == "first-frame" and objective.video_weight == 0
        clips, held_out = data.parts(policy.preparation, first_alone)

        def told() -> None:
            claim_run(self.out, description)
            report.write(self.out / "start.json")
            save_split(self.out / "split.json", data.split, data.header["source"])
            print("\n".join(report.lines()))

        with assembled(self.parallel, device, sum(p.numel() for p in policy.parameters())) as team:
            team.on_main(told)
            watch = validation(held_out, objective, team=team)
            run = Run(
                policy,
                clips,
                PolicyLoss(objective),
                config,
                self.out,
                validate=watch,
                rollout=lambda step, model: {f"val_{name}": value for name, value in watch(model).items()},
                team=team,
                arrangement=Arrangement(compute, self.recompute),
                wandb=self.wandb,
            )
            return self.carry_out(run, "policy")

    # -- what is trained --------------------------------------------------------------------------------------------

    @property
    def _latents(self) -> Path:
        return self.out / "latents" if self.latents is None else self.latents

    @property
    def _variant(self) -> "Variant":
        from simforcing.policy.settings import SETTINGS

        return SETTINGS[self.setting].variants[0] if self.variant is None else self.variant

    def _configuration(self) -> tuple["PolicyRecipe", "TrainConfig", "PolicyObjective"]:
        from simforcing.data.cache import INDEX, read_header
        from simforcing.policy.settings import SETTINGS, check_variant
        from simforcing.recipes import POLICIES, policy_recipe
        from simforcing.train.overrides import with_settings
        from simforcing.train.recipe import TO_SUPPLY

        if self.encode_only and self.latents is None:
            raise SimForcingError("--encode-only needs --latents, the directory that the runs will share")
        check_variant(self.setting, self._variant)
        text, own = self.text, POLICIES.get(self.recipe)
        if text is None and own is not None and own.text in TO_SUPPLY and (self._latents / INDEX).exists():
            text = read_header(self._latents).get("text_source")  # the cache holds its embeddings
        found = policy_recipe(self.recipe, self.codec, text)
        config = self.lasting(found.training)
        if self.validate_every is not None:
            config = replace(config, rollout_every=self.validate_every)
        parts = {"training": config, "objective": SETTINGS[self.setting].objective}
        changed = with_settings(parts, self.set)
        return found, changed["training"], changed["objective"]

    def _content(self, dataset: "Dataset", found: "PolicyRecipe") -> "PolicyWindows":
        from simforcing.policy.libero_check import are_liberos, left_to_right
        from simforcing.policy.windows import PolicyWindows, after_end, chosen_cameras

        cameras, end = chosen_cameras(dataset, self.cameras), after_end(dataset.action_convention)
        if are_liberos(dataset):  # of public ones nothing is declared: their actions are changes
            cameras, end = tuple(self.cameras) or left_to_right(cameras), "still"
        end = self.after_end or found.after_end or end
        every = found.window_every if self.every is None else self.every
        return PolicyWindows(found.rule_of(len(cameras)), cameras, end, every)

    def _policy(
        self,
        found: "PolicyRecipe",
        data: "PolicyData",
        kind: "Source",
        source: "WorldModel | None",
        where: str,
        objective: "PolicyObjective",
    ) -> tuple["Policy", "StartReport"]:
        from simforcing.policy.data import config_of
        from simforcing.policy.settings import prepare
        from simforcing.policy.start import initialised

        preparation = data.preparation(found)
        config = config_of(found, preparation, int(data.header["codec"]["channels"]), self._variant)
        policy, report = initialised(config, preparation, source, kind, self.action_from, self.seed, where)
        prepare(policy, self.setting, objective)
        return policy, report

    def _description(
        self,
        found: "PolicyRecipe",
        config: "TrainConfig",
        objective: "PolicyObjective",
        start: "Start",
        header: dict[str, Any],
        split: dict[str, list[int]],
        compute: "torch.dtype",
    ) -> dict[str, Any]:
        """What defines the run."""
        from simforcing.cli.train import fingerprint
        from simforcing.train.words import family

        kept = ("source", "codec", "rule", "every", "left_to_right", "after_end")
        return {
            "role": "policy",
            "recipe": self.recipe,
            "setting": self.setting,
            "variant": self._variant,
            "start": fingerprint(start.place) if start.place else "scratch",
            "start_kind": start.kind,
            "action_from": self.action_from,
            "text": family(found.text),
            **self.described(config, int(os.environ.get("WORLD_SIZE", "1")), compute),
            "objective": asdict(objective),
            "data": {name: header[name] for name in kept},
            "split": split,
        }

    # -- encoding ---------------------------------------------------------------------------------------------------

    def _ready(
        self,
        dataset: "Dataset",
        content: "PolicyWindows",
        found: "PolicyRecipe",
        device: "torch.device",
        description: dict[str, Any],
    ) -> None:
        """The latents are there, or are made now, once it is clear that OUT is this run's."""
        from simforcing.data.cache import INDEX
        from simforcing.train.directory import claim_run

        complete = (self._latents / INDEX).exists()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if not complete:
                raise SimForcingError(
                    f"{self._latents}: no latents yet; make them with one process and --encode-only first"
                )
            return
        claim_run(self.out, description)
        if not complete:
            self._encode(dataset, content, found, device)

    def _encode(
        self, dataset: "Dataset", content: "PolicyWindows", found: "PolicyRecipe", device: "torch.device"
    ) -> None:
        from simforcing.cli.show import progress
        from simforcing.model.codec import load_codec
        from simforcing.train.encode import encode_windows
        from simforcing.train.words import Words

        if self.workers < 1:
            raise SimForcingError(f"--workers {self.workers}: give at least 1")
        with progress() as show:
            made = encode_windows(
                dataset,
                self._latents,
                load_codec(found.codec),
                content,
                words=Words(found.text, found.text_length),
                skip_bad=self.skip_bad,
                workers=self.workers,
                codec_source=found.codec,
                device=str(device),
                report=lambda stage, done, total: show(stage, done / max(total, 1), f"{done} of {total}"),
            )
        for position, reason in made.left_out:
            print(f"skipped episode {position}: {reason}")


def doubt(dataset: "Dataset") -> None:
    """Says in what recordings that seem to be LIBERO's are not as its evaluation will show things."""
    from simforcing.policy.libero_check import are_liberos, check_recordings

    if are_liberos(dataset):
        for what, wrong in check_recordings(dataset).items():
            print(f"doubtful: {what}: {wrong}", file=sys.stderr)
