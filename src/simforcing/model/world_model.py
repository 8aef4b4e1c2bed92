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
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, UInt8
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from simforcing.errors import InputError, SimForcingError, check_shape
from simforcing.files import partial_path
from simforcing.model.checks import check_inputs
from simforcing.model.experts import ActionExpert, ExpertConfig, Unit, VideoExpert, frame_rope, index_rope, video_rope
from simforcing.model.flow import Flow
from simforcing.model.mixture import Condition, action_keys_values, denoise, remember_first
from simforcing.model.preparation import Preparation
from simforcing.model.sim_condition import SimCondition, SimResiduals
from simforcing.model.stored import check_fields

if TYPE_CHECKING:
    from simforcing.predict.predictor import Prediction, Predictor


@dataclass(frozen=True)
class WorldModelConfig:
    """Sizes and choices of the network; what prepares its inputs is in `Preparation`.

    attention: of video tokens. `first_frame_causal`: the first frame sees no later one (SimForcing); `bidirectional`:
        it sees all, as in Wan2.2 itself. Actions are seen by all video tokens and see none.
    """

    video: ExpertConfig
    action: ExpertConfig
    channels: int
    patch: tuple[int, int, int] = (1, 2, 2)
    action_dim: int = 7
    proprio_dim: int = 7
    action_positions: Literal["index", "frame"] = "index"
    attention: Literal["first_frame_causal", "bidirectional"] = "first_frame_causal"
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


M = TypeVar("M", bound="WorldModel")


class WorldModel(Unit):
    """A video expert and an action expert in joint attention, with simulation latents as an optional condition.

    SimForcing, sections on the mixture of transformers and on simulation conditioning.
    """

    config_type: ClassVar[type[WorldModelConfig]] = WorldModelConfig
    preparation_type: ClassVar[type[Preparation]] = Preparation

    def __init__(self, config: WorldModelConfig, preparation: Preparation | None = None) -> None:
        super().__init__()
        self.preparation = preparation
        self._predictor: Predictor | None = None
        shared = [(e.num_layers, e.num_heads, e.head_dim) for e in (config.video, config.action)]
        if shared[0] != shared[1]:
            raise InputError(
                "the experts attend jointly: layers, heads and head width must be the same in both, they are "
                f"{list(shared[0])} in video and {list(shared[1])} in action"
            )
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
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.proprio.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are. Time, noise level and the sampler's state are float32 whatever it is."""
        return self.proprio.weight.dtype

    @property
    def flow(self) -> Flow:
        """The schedule that the model was trained with."""
        return self.config.flow

    def context(
        self, text: Float[Tensor, "B L X"], mask: Bool[Tensor, "B L"], proprio: Float[Tensor, "B p"]
    ) -> tuple[Float[Tensor, "B L+1 X"], Bool[Tensor, "B L+1"]]:
        """Text tokens with the (normalised) proprioception of the first frame as one more token after them."""
        token = self.proprio(proprio.to(self.device, self.dtype))[:, None]
        return torch.cat([text.to(token), token], dim=1), torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)

    def condition(
        self,
        action: Float[Tensor, "B A a"] | None,
        context: Float[Tensor, "B L X"],
        context_mask: Bool[Tensor, "B L"] | None,
        grid: Sequence[int],
        sim_latents: Float[Tensor, "B C F H W"] | None = None,
        sim_gate: Float[Tensor, " B"] | None = None,
    ) -> Condition:
        """What does not depend on the noise level, for `denoise`. `grid` is F, H, W of the latents.

        action: normalised; None leaves the action expert out, which is not the same as zero actions.
        context_mask: None, or all True on the host: no mask. A mask on a device is used without looking at it.
        sim_gate: 1 with, 0 without simulation, a sample; None means 1.
        """
        device, dtype = self.device, self.dtype
        dense = context_mask is not None and not (context_mask.device.type == "cpu" and bool(context_mask.all()))
        mask = context_mask[:, None, None].to(device) if dense and context_mask is not None else None
        context = context.to(device, dtype)
        frames, height, width = (n // p for n, p in zip(grid, self.config.patch, strict=True))
        actions = None
        if action is not None:
            steps, head = action.shape[1], self.config.action.head_dim
            aligned = self.config.action_positions == "frame"
            rope = frame_rope(steps, frames, head, device) if aligned else index_rope(steps, head, device)
            actions = action_keys_values(self.action, action.to(device, dtype), context, mask, rope)
        turns = video_rope(frames, height, width, self.config.video.head_dim, device)
        sim = self.sim_residuals(sim_latents, sim_gate)
        causal = self.config.attention == "first_frame_causal"
        return Condition(turns, self.video.text_keys_values(context), mask, actions, sim, causal)

    def sim_residuals(
        self, sim_latents: Float[Tensor, "B C F H W"] | None, gate: Float[Tensor, " B"] | None = None
    ) -> SimResiduals | None:
        """Residuals of every block, or None without simulation latents."""
        if sim_latents is None:
            return None
        if self.sim is None:
            raise SimForcingError("this model has no simulation condition (sim_condition = false in its configuration)")
        result: SimResiduals = self.sim(sim_latents, gate)
        return result

    def remember_first(self, first: Float[Tensor, "B C 1 H W"], condition: Condition) -> Condition:
        """The condition of a rollout from this clean first latent frame; `denoise` then takes the later frames."""
        return remember_first(self.video, first, condition)

    def denoise(
        self,
        latents: Float[Tensor, "B C F H W"],
        timestep: Float32[Tensor, " B"],
        condition: Condition,
        first_frame_clean: bool | Bool[Tensor, " B"] = True,
    ) -> Float32[Tensor, "B C F H W"]:
        """Velocity of all frames, or of the later ones if the condition knows the first (see `remember_first`).

        timestep: [B], or [1] for all samples. first_frame_clean: the first frame has time 0; False, or False for some
        samples: it has the time of the others.
        """
        times = timestep[:, None]
        if not condition.knows_first and first_frame_clean is not False:
            first = times * 0 if first_frame_clean is True else torch.where(first_frame_clean[:, None], 0.0, times)
            times = torch.cat([first, times], dim=1)
        return denoise(self.video, latents, times, condition).float()

    def velocity(
        self,
        latents: Float[Tensor, "B C F H W"],
        timestep: Float32[Tensor, " B"],
        action: Float[Tensor, "B A a"] | None,
        context: Float[Tensor, "B L X"],
        context_mask: Bool[Tensor, "B L"] | None,
        sim_latents: Float[Tensor, "B C F H W"] | None = None,
        sim_gate: Float[Tensor, " B"] | None = None,
        first_frame_clean: bool = True,
    ) -> Float32[Tensor, "B C F H W"]:
        """Velocity of noisy latents in one call; frame 0 must be the clean first frame unless said otherwise.

        timestep in [0, 1000], action normalised, context with its proprioception token (see `context`).

        Raises:
            InputError: a shape or a value does not fit; names the argument.
        """
        check_inputs(self.config, latents.shape, action, context, context_mask)
        check_shape("timestep", timestep, [len(latents)])
        if sim_latents is not None:
            check_shape("sim_latents", sim_latents, latents.shape)
        if sim_gate is not None:
            check_shape("sim_gate", sim_gate, [len(latents)])
            if sim_latents is None:
                raise InputError(f"sim_gate of shape {list(sim_gate.shape)} is given without sim_latents; give both")
        condition = self.condition(action, context, context_mask, latents.shape[2:], sim_latents, sim_gate)
        return self.denoise(latents, timestep, condition, first_frame_clean)

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

        if isinstance(instruction, str):
            raise InputError("instruction is one text, it must be a list of B of them; write [instruction]")
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
    def from_pretrained(
        cls, source: str | Path, revision: str | None = None, dtype: torch.dtype | None = torch.float32
    ) -> Self:
        """Loads a model that ships (see `located`), a directory, or a repository of the hub, strictly. dtype None keeps
        the weights as they are stored.

        Raises:
            SimForcingError: there is no model at `source`, or it does not fit.
        """
        directory = located(source)
        if directory.is_dir():
            return load_model(directory, cls, dtype)
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            return load_model(Path(snapshot_download(str(source), revision=revision)), cls, dtype)
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise SimForcingError(f"no model at {source}: not a directory, and not to be had from the hub") from error

    def push_to_hub(self, repository: str, private: bool = False) -> str:
        """Uploads the model directory to the hub (with the user's stored token); returns its address.

        Raises:
            SimForcingError: the hub is not reached, or refuses the name, the token or the files.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        api = HfApi()
        with tempfile.TemporaryDirectory() as scratch:
            self._write(Path(scratch))
            try:
                api.create_repo(repository, private=private, exist_ok=True)
                return str(api.upload_folder(repo_id=repository, folder_path=scratch))
            except (HfHubHTTPError, HFValidationError, OSError) as error:
                why = " ".join(str(error).split()) or type(error).__name__
                raise SimForcingError(f"{repository}: not uploaded to the hub ({why}); check name and token") from error


def load_model(root: Path, kind: type[M], dtype: torch.dtype | None = torch.float32) -> M:
    """Reads a directory that `save_pretrained` wrote, strictly. dtype None keeps the weights as they are stored.

    Raises:
        SimForcingError: a file is missing or damaged, or tensors are missing, unexpected or wrongly shaped (listed).
    """
    for name in ("config.json", "model.safetensors"):
        if not (root / name).is_file():
            raise SimForcingError(f"{root} is not a model directory: {name} is missing")
    config, preparation = _described(root, kind)
    try:
        # Copies: aligned as fresh tensors are (products with one row round by that), and free of the file.
        stored = load_file(root / "model.safetensors")
        state = {k: v.to(v.dtype if dtype is None else dtype, copy=True) for k, v in stored.items()}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise SimForcingError(f"{root} is damaged: {error}") from error
    try:
        with torch.device("meta"):
            model = kind(config, preparation)
    except SimForcingError as error:
        raise SimForcingError(f"{root / 'config.json'}: {error}") from error
    load_strictly(model, state, str(root))
    return model


def _described(root: Path, kind: type["WorldModel"]) -> tuple[WorldModelConfig, Preparation | None]:
    """What `config.json` and `stats.json` say.

    Raises:
        SimForcingError: names the file, and the field that is missing or wrong.
    """
    file = root / "config.json"
    try:
        description = json.loads(file.read_text())
        if not isinstance(description, dict) or not {"model", "preparation"} <= set(description):
            raise SimForcingError("it must be an object with 'model' and 'preparation'")
        plain = description["preparation"]
        check_fields(kind.config_type, description["model"], "model")
        config = kind.config_type.from_dict(description["model"])
        if plain is None:
            return config, None
        check_fields(kind.preparation_type, plain, "preparation")
        for part in ("rule", "action"):
            if part not in plain:
                raise SimForcingError(f"preparation.{part} is missing")
        file = root / "stats.json"
        stats = json.loads(file.read_text())
        for part in ("action", "state"):
            if not isinstance(stats, dict) or not isinstance(stats.get(part), dict):
                raise SimForcingError(f"'{part}' is missing or no object")
        return config, kind.preparation_type.from_dict(plain, stats)
    except SimForcingError as error:
        raise SimForcingError(f"{file}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SimForcingError(f"{file} is damaged: {error}") from error


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


def located(source: str | Path) -> Path:
    """The directory of a model that ships, by its name: `bundled-teacher` (in short `bundled`) or `bundled-student`;
    any other source as it is.

    Raises:
        SimForcingError: this installation does not ship it.
    """
    names = {"bundled": "teacher", "bundled-teacher": "teacher", "bundled-student": "student"}
    name = names.get(str(source))
    if name is None:
        return Path(source)
    path = Path(str(files("simforcing") / "assets" / name))
    if not path.is_dir():
        raise SimForcingError(f"this installation does not ship {source}; give a model directory")
    return path
