"""`WorldModel`: what will the camera see if the arm does this?

Legend: B batch, C channels, F latent frames, H W latent grid, A action steps, a action numbers, L context tokens,
X text width.
"""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, UInt8
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from simforcing.errors import SimForcingError
from simforcing.files import partial_path
from simforcing.model.experts import ActionExpert, ExpertConfig, VideoExpert, frame_rope, index_rope
from simforcing.model.flow import Flow
from simforcing.model.mixture import Condition, action_keys_values, denoise
from simforcing.model.preparation import Preparation
from simforcing.model.sim_condition import SimCondition

if TYPE_CHECKING:
    from simforcing.predict.predictor import Prediction, Predictor


@dataclass(frozen=True)
class WorldModelConfig:
    """Sizes and choices of the network; what prepares its inputs is in `Preparation`."""

    video: ExpertConfig
    action: ExpertConfig
    channels: int
    patch: tuple[int, int, int] = (1, 2, 2)
    action_dim: int = 7
    proprio_dim: int = 7
    action_positions: Literal["index", "frame"] = "index"
    sim_condition: bool = True
    flow: Flow = Flow()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`; an unknown key is an error."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - known):
            raise SimForcingError(
                f"model configuration has unknown keys {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        nested = {"video": ExpertConfig, "action": ExpertConfig, "flow": Flow}
        values = {k: nested[k](**v) if k in nested else v for k, v in data.items()}
        return cls(**values | {"patch": tuple(data.get("patch", cls.patch))})


class WorldModel(nn.Module):
    """A video expert and an action expert in joint attention, with simulation latents as an optional condition.

    SimForcing, sections on the mixture of transformers and on simulation conditioning.
    """

    def __init__(self, config: WorldModelConfig, preparation: Preparation | None = None) -> None:
        super().__init__()
        self.preparation = preparation
        self._predictor: Predictor | None = None
        if (
            config.video.attention_dim != config.action.attention_dim
            or config.video.num_layers != config.action.num_layers
        ):
            raise SimForcingError("the experts attend jointly: layers, heads and head width must be the same in both")
        self.config = config
        self.video = VideoExpert(config.video, config.channels, config.patch)
        self.action = ActionExpert(config.action, config.action_dim)
        self.proprio = nn.Linear(config.proprio_dim, config.video.text_dim)
        self.sim = (
            SimCondition(config.video.num_layers, config.channels, config.video.dim, config.patch)
            if config.sim_condition
            else None
        )

    @property
    def flow(self) -> Flow:
        """The schedule that the model was trained with."""
        return self.config.flow

    def context(
        self, text: Float[Tensor, "B L X"], mask: Bool[Tensor, "B L"], proprio: Float[Tensor, "B p"]
    ) -> tuple[Float[Tensor, "B L+1 X"], Bool[Tensor, "B L+1"]]:
        """Text tokens with the (normalised) proprioception of the first frame as one more token after them."""
        token = self.proprio(proprio)[:, None]
        return torch.cat([text, token], dim=1), torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)

    def condition(
        self,
        action: Float[Tensor, "B A a"] | None,
        context: Float[Tensor, "B L X"],
        context_mask: Bool[Tensor, "B L"] | None,
        frames: int,
        sim_latents: Float[Tensor, "B C F H W"] | None = None,
        sim_gate: Float[Tensor, " B"] | None = None,
    ) -> Condition:
        """What does not depend on the noise level, for `denoise`. `frames` counts latent frames.

        action: normalised; None leaves the action expert out, which is not the same as zero actions.
        sim_gate: 1 with, 0 without simulation, a sample; None means 1.
        """
        mask = None if context_mask is None or bool(context_mask.all()) else context_mask[:, None, None]
        actions = None
        if action is not None:
            head = self.config.action.head_dim
            aligned = self.config.action_positions == "frame"
            rope = frame_rope(action.shape[1], frames, head) if aligned else index_rope(action.shape[1], head)
            actions = action_keys_values(self.action, action, context, mask, rope.to(action.device))
        return Condition(self.video.text_keys_values(context), mask, actions, self.sim_residuals(sim_latents, sim_gate))

    def sim_residuals(self, sim_latents: Tensor | None, gate: Tensor | None = None) -> list[Tensor] | None:
        """Residuals of every block, or None without simulation latents."""
        if sim_latents is None:
            return None
        if self.sim is None:
            raise SimForcingError("this model has no simulation condition (sim_condition = false in its configuration)")
        result: list[Tensor] = self.sim(sim_latents, gate)
        return result

    def denoise(
        self,
        latents: Float[Tensor, "B C F H W"],
        timestep: Float32[Tensor, " B"],
        condition: Condition,
        first_frame_clean: bool = True,
    ) -> Float[Tensor, "B C F H W"]:
        """Velocity. The first latent frame is the condition, clean, and embedded with time 0 unless said otherwise."""
        times = timestep[:, None].repeat(1, latents.shape[2] // self.config.patch[0])
        if first_frame_clean:
            times[:, 0] = 0
        return denoise(self.video, latents, times, condition)

    def velocity(
        self,
        latents: Float[Tensor, "B C F H W"],
        timestep: Float32[Tensor, " B"],
        action: Float[Tensor, "B A a"] | None,
        context: Float[Tensor, "B L X"],
        context_mask: Bool[Tensor, "B L"] | None,
        sim_latents: Float[Tensor, "B C F H W"] | None = None,
        sim_gate: Float[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B C F H W"]:
        """Velocity of noisy latents in one call; frame 0 must be the clean first frame.

        timestep in [0, 1000], action normalised, context with its proprioception token (see `context`).
        """
        condition = self.condition(action, context, context_mask, latents.shape[2], sim_latents, sim_gate)
        return self.denoise(latents, timestep, condition)

    def predict(
        self,
        first_real: UInt8[np.ndarray, "B H W 3"],
        first_sim: UInt8[np.ndarray, "B H W 3"] | None,
        action: Float32[np.ndarray, "B A a"],
        proprio: Float32[np.ndarray, "B p"],
        instruction: Sequence[str],
        w: float = 0.6,
        sim_steps: int = 1,
        real_steps: int = 10,
        seed: int = 0,
    ) -> "Prediction":
        """Videos that follow first frames under actions, batched: pixels, stored numbers and words in, pixels out.

        action and proprio in the units and convention of the data that the model was trained on. `first_sim` may be
        None with w = 0. The noise of clip i follows from seed + i.

        Raises:
            SimForcingError: sizes do not fit, or w > 0 without a simulated first frame.
        """
        from simforcing.predict.predictor import Predictor, Start  # the room below: this method is its front door

        seeds = [seed + i for i in range(len(instruction))]
        start = Start(first_real, action, proprio, list(instruction), first_sim, seeds)
        if self._predictor is None:
            self._predictor = Predictor(self)
        return self._predictor.predict(start, w, sim_steps, real_steps)

    def unused_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the output does not depend on: the last action block after its keys and values, the action head."""
        last = f"action.blocks.{self.config.action.num_layers - 1}."
        used = ("attn1.to_k", "attn1.to_v", "attn1.norm_k", "scale_shift_table")
        for name, parameter in self.named_parameters():
            tail = name.removeprefix(last)
            if name.startswith("action.head.") or (tail != name and not tail.startswith(used)):
                yield name, parameter

    def with_sim_condition(self) -> "WorldModel":
        """A copy that can be conditioned on simulation: the same weights, and projections that start at zero."""
        grown = WorldModel(dataclasses.replace(self.config, sim_condition=True), self.preparation)
        state = grown.state_dict() | {k: v.clone() for k, v in self.state_dict().items()}
        load_strictly(grown, state, "the model to grow")
        return grown

    # -- saving and loading -----------------------------------------------------------------------------------------

    def save_pretrained(self, directory: str | Path, half: bool = False) -> None:
        """Writes `config.json`, `stats.json` and `model.safetensors` to a temporary directory and renames it.

        half: weights in float16, for models that ship; they are float32 again once loaded.

        Raises:
            SimForcingError: the directory exists and is not empty.
        """
        out = Path(directory)
        if out.exists() and any(out.iterdir()):
            raise SimForcingError(f"{out} is not empty; choose another directory, nothing was written")
        partial = partial_path(out)
        partial.mkdir(parents=True)
        try:
            self._write(partial, half)
            if out.exists():
                out.rmdir()
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _write(self, directory: Path, half: bool = False) -> None:
        description: dict[str, Any] = {"model": dataclasses.asdict(self.config), "preparation": None}
        if self.preparation is not None:
            description["preparation"], stats = self.preparation.to_dict()
            (directory / "stats.json").write_text(json.dumps(stats, indent=2) + "\n")
        (directory / "config.json").write_text(json.dumps(description, indent=2) + "\n")
        state = {k: (v.half() if half else v).contiguous() for k, v in self.state_dict().items()}
        save_file(state, directory / "model.safetensors")

    @classmethod
    def from_pretrained(cls, source: str | Path, revision: str | None = None) -> "WorldModel":
        """Loads a directory, or a repository of the hub, strictly.

        Raises:
            SimForcingError: there is no model at `source`, or it does not fit.
        """
        if Path(source).is_dir():
            return load_world_model(Path(source))
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            return load_world_model(Path(snapshot_download(str(source), revision=revision)))
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise SimForcingError(f"no model at {source}: not a directory, and not to be had from the hub") from error

    def push_to_hub(self, repository: str, private: bool = False) -> str:
        """Uploads the model directory to the hub (with the user's stored token); returns its address."""
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            self._write(Path(scratch))
            return str(api.upload_folder(repo_id=repository, folder_path=scratch))


def load_world_model(root: Path) -> WorldModel:
    """Reads a directory that `save_pretrained` wrote, strictly.

    Raises:
        SimForcingError: a file is missing or damaged, or tensors are missing, unexpected or wrongly shaped (listed).
    """
    for name in ("config.json", "model.safetensors"):
        if not (root / name).is_file():
            raise SimForcingError(f"{root} is not a model directory: {name} is missing")
    try:
        description = json.loads((root / "config.json").read_text())
        config = WorldModelConfig.from_dict(description["model"])
        preparation = None
        if description["preparation"] is not None:
            preparation = Preparation.from_dict(
                description["preparation"], json.loads((root / "stats.json").read_text())
            )
        state = load_file(root / "model.safetensors")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise SimForcingError(f"{root} is damaged: {error}") from error
    with torch.device("meta"):
        model = WorldModel(config, preparation)
    load_strictly(model, state, str(root))
    return model.float()


def load_strictly(model: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Loads all tensors or none.

    Raises:
        SimForcingError: lists missing, unexpected and wrongly shaped tensors.
    """
    want = model.state_dict()
    missing = sorted(set(want) - set(state))
    unexpected = sorted(set(state) - set(want))
    shapes = sorted(
        f"{k} {tuple(state[k].shape)} instead of {tuple(want[k].shape)}"
        for k in set(want) & set(state)
        if state[k].shape != want[k].shape
    )
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", shapes))
        if names
    ]
    if problems:
        raise SimForcingError(f"{source} does not fit the model; {'; '.join(problems)}")
    model.load_state_dict(state, assign=any(p.is_meta for p in model.parameters()))


def _asset(name: str) -> Path:
    path = Path(str(files("simforcing") / "assets" / name))
    if not path.is_dir():
        raise SimForcingError(f"this installation does not ship {name}; give a model directory")
    return path


def bundled_teacher() -> Path:
    """Directory of the teacher that ships with the package."""
    return _asset("teacher")


def open_model(source: str | Path) -> WorldModel:
    """`bundled-teacher`, `bundled-student`, a directory or a repository of the hub."""
    names = {"bundled-teacher": "teacher", "bundled-student": "student"}
    return WorldModel.from_pretrained(_asset(names[str(source)]) if str(source) in names else source)
