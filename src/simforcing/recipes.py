"""Named configurations: sizes of the model, clip rule, codec, text, and how each role is trained."""

from dataclasses import replace

from simforcing.data.episode import nearest
from simforcing.data.windows import ClipRule
from simforcing.errors import SimForcingError
from simforcing.model.experts import ExpertConfig
from simforcing.policy.recipe import PolicyRecipe
from simforcing.train.config import TrainConfig
from simforcing.train.objective import ObjectiveConfig
from simforcing.train.recipe import TO_SUPPLY, WAN_CODEC, WAN_TEXT, Recipe

_SMALL = {"num_layers": 4, "num_heads": 6, "head_dim": 32, "text_dim": 384, "freq_dim": 64}

_DEMO_RUN = TrainConfig(seconds=360.0, batch_size=8, lr=1.0e-3, sim_lr_scale=2.0)

RECIPES: dict[str, Recipe] = {
    "demo": Recipe(
        video=ExpertConfig(dim=192, ffn_dim=576, **_SMALL),
        action=ExpertConfig(dim=96, ffn_dim=192, **_SMALL),
        rule=ClipRule(frames=13, stride=1, height=64, width=64),
        codec="bundled",
        text="minilm",
        text_length=32,
        text_pooling="mean",
        action_positions="frame",
        teacher=replace(_DEMO_RUN, batch_size=16, lr=2e-3),
        student=_DEMO_RUN,
        baseline=_DEMO_RUN,
        objective=ObjectiveConfig(motion_weight=0.05, syn_share=0.25),
        window_every=4,
        notes=(
            "64 x 64 pixels, 13 frames, absolute target poses, action positions on the video's time axis and one text "
            "token: departures from the released setting that let a model follow actions after minutes on a CPU.",
        ),
    ),
}
RECIPES["tiny"] = replace(
    RECIPES["demo"],
    text="hashed-words",
    text_length=128,
    notes=(
        *RECIPES["demo"].notes,
        "For your own robot on a CPU: words are hashed, so that any instruction works without a text model.",
    ),
)
RECIPES["libero-tiny"] = replace(
    RECIPES["tiny"],
    rule=ClipRule(frames=9, stride=4, height=64, width=64),
    text_length=64,
    notes=(
        "World models whose teacher and student 'policy-tiny' starts from: its sizes, windows of 33 rows, its text. "
        "One camera; sizes, windows and steps are our choice.",
    ),
)
RECIPES["study"] = replace(
    RECIPES["demo"],
    teacher=replace(RECIPES["demo"].teacher, seconds=None, steps=600),
    student=replace(_DEMO_RUN, seconds=None, steps=300),
    baseline=replace(_DEMO_RUN, seconds=None, steps=300),
    objective=ObjectiveConfig(syn_share=0.25),
    notes=(
        *RECIPES["demo"].notes,
        "The paper's weights of the objective; a quarter of each batch estimates the simulated branch. Runs are "
        "counted in steps, so that they can be repeated exactly.",
    ),
)

# -- one consumer GPU -----------------------------------------------------------------------------------------------

_MEDIUM = {"num_layers": 12, "num_heads": 8, "head_dim": 96, "text_dim": 384, "freq_dim": 256}
_SMALL_RUN = TrainConfig(epochs=20.0, samples_per_episode=30, batch_size=16, lr=3e-4, checkpoint_seconds=600.0)

RECIPES["small"] = Recipe(
    video=ExpertConfig(dim=768, ffn_dim=3072, **_MEDIUM),
    action=ExpertConfig(dim=256, ffn_dim=1024, **_MEDIUM),
    rule=ClipRule(frames=21, stride=1, height=128, width=160),
    codec="bundled",
    text="minilm",
    text_length=64,
    text_pooling="tokens",
    action_positions="frame",
    teacher=_SMALL_RUN,
    student=_SMALL_RUN,
    baseline=_SMALL_RUN,
    window_every=4,
    notes=(
        "For one consumer GPU and nothing to download but MiniLM. Sizes, learning rate and action positions are our "
        "own choice, not the paper's, and no result was measured with them.",
        "The bundled codec was trained on the bundled world; for other pictures give --codec.",
    ),
)

# -- the paper's ----------------------------------------------------------------------------------------------------

_WAN = {"num_layers": 30, "num_heads": 24, "head_dim": 128, "text_dim": 4096, "freq_dim": 256}
_WAN_RUN = TrainConfig(
    epochs=20.0,
    samples_per_episode=30,
    batch_size=16,
    lr=1e-4,
    warmup=0.05,
    final_lr=0.01,
    betas=(0.9, 0.95),
    weight_decay=0.01,
    clip=1.0,
    checkpoint_seconds=1800.0,
    validate_seconds=1800.0,
    rollout_every=1000,
)
_WAN_NOTES = (
    "The paper's sizes and values. Batch 16 a process; the paper trains on 8 GPUs, so on 128 clips a step.",
    f"To supply: {TO_SUPPLY[WAN_CODEC]}; {TO_SUPPLY[WAN_TEXT]}; for the teacher, --teacher with the imported "
    "Wan2.2-TI2V-5B to start from.",
    "An epoch is 30 windows an episode, as in the release; which 30 differs, since windows are cached and shuffled "
    "instead of drawn anew.",
    "Not the paper's: no weight decay on norms, biases and modulations, the first frame's clean estimate is itself, "
    "one prompt template a domain (docs/decisions.md).",
)

RECIPES["bridge-wan5b"] = Recipe(
    video=ExpertConfig(dim=3072, ffn_dim=14336, **_WAN),
    action=ExpertConfig(dim=1024, ffn_dim=4096, **_WAN),
    rule=ClipRule(frames=21, stride=1, height=224, width=320),
    codec=WAN_CODEC,
    text=WAN_TEXT,
    text_length=128,
    text_pooling="tokens",
    text_padding="zeros",
    action_positions="index",
    teacher=_WAN_RUN,
    student=_WAN_RUN,
    baseline=_WAN_RUN,
    objective=ObjectiveConfig(
        video_weight=1.0,
        motion_weight=0.5,
        real_weight=1.0,
        syn_weight=0.1,
        retention=0.7,
        corrupt_probability=0.4,
        corrupt_keep=(0.5, 0.9),
        corrupt_noise=(0.1, 0.3),
    ),
    flow_objective=ObjectiveConfig(action_dropout=0.1),
    notes=("Bridge: windows of 21 consecutive frames, one action a transition.", *_WAN_NOTES),
)
RECIPES["interndata-wan5b"] = replace(
    RECIPES["bridge-wan5b"],
    rule=ClipRule(frames=33, stride=4, height=224, width=320),
    window_every=16,
    notes=(
        "InternData-A1: windows of 129 steps, every 4th frame and all 128 actions.",
        *_WAN_NOTES,
        "Windows are encoded every 16 steps, our choice: a cache of every window would be sixteen times larger.",
    ),
)


# -- policies -------------------------------------------------------------------------------------------------------

POLICIES: dict[str, PolicyRecipe] = {
    "policy-tiny": PolicyRecipe(
        video=RECIPES["tiny"].video,
        action=RECIPES["tiny"].action,
        rule=ClipRule(frames=9, stride=4, height=64, width=64),
        codec="bundled",
        text=RECIPES["tiny"].text,
        text_length=64,
        text_pooling="mean",
        action_positions="frame",
        training=TrainConfig(steps=3000, batch_size=16, lr=1e-3),
        window_every=2,
        notes=(
            "The sizes of 'demo', 'tiny' and 'libero-tiny', so that their models can be started from (with --text "
            "minilm from those of 'demo'). 64 x 64 pixels a camera; sizes, steps and learning rate are our choice.",
        ),
    ),
    "policy-libero": PolicyRecipe(
        video=RECIPES["bridge-wan5b"].video,
        action=RECIPES["bridge-wan5b"].action,
        rule=ClipRule(frames=9, stride=4, height=224, width=224),
        codec=WAN_CODEC,
        text=WAN_TEXT,
        text_length=128,
        text_pooling="tokens",
        text_padding="zeros",
        action_positions="index",
        training=replace(_WAN_RUN, epochs=10.0, samples_per_episode=None, rollout_every=0),
        after_end="still",
        notes=(
            "FastWAM's values for LIBERO: every row of every episode begins a window of 33. Batch 16 a process; it "
            "trains on 8 GPUs, so on 128 windows a step, with --seed 42.",
            f"To supply: {TO_SUPPLY[WAN_CODEC]}; {TO_SUPPLY[WAN_TEXT]}; and --from with what to start from.",
            "Not FastWAM's: episodes are held out, statistics are of the others, no weight decay on norms, biases and "
            "modulations (docs/decisions.md).",
        ),
    ),
}


def policy_recipe(name: str, codec: str | None = None, text: str | None = None) -> PolicyRecipe:
    """The policy recipe of this name, ready for a run: with the user's codec and text encoder where it needs them.

    Raises:
        SimForcingError: there is none (says which is nearest), or it needs a source that is not given (says which).
    """
    if name not in POLICIES:
        raise SimForcingError(f"no policy recipe {name!r}; {nearest(name, POLICIES)}")
    return POLICIES[name].with_sources(codec, text)


def named(name: str) -> Recipe:
    """The recipe of this name as it is written here; its codec and text encoder may have to be supplied.

    Raises:
        SimForcingError: there is none; says which is nearest.
    """
    if name not in RECIPES:
        raise SimForcingError(f"no recipe {name!r}; {nearest(name, RECIPES)}")
    return RECIPES[name]


def recipe(name: str, codec: str | None = None, text: str | None = None) -> Recipe:
    """The recipe of this name, ready for a run: with the user's codec and text encoder where it needs them.

    Raises:
        SimForcingError: there is no such recipe, or it needs a source that is not given (says which).
    """
    return named(name).with_sources(codec, text)
