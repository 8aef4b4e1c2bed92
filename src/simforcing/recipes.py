"""Named configurations: sizes of the model, clip rule, codec, text, and how each role is trained."""

from dataclasses import replace

from simforcing.data.episode import nearest
from simforcing.data.windows import ClipRule
from simforcing.errors import SimForcingError
from simforcing.model.experts import ExpertConfig
from simforcing.train.loop import TrainConfig
from simforcing.train.objective import ObjectiveConfig
from simforcing.train.recipe import Recipe

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
    notes=(
        *RECIPES["demo"].notes,
        "For your own robot on a CPU: words are hashed, so that any instruction works without a text model.",
    ),
)


def recipe(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        SimForcingError: there is none; says which is nearest.
    """
    if name not in RECIPES:
        raise SimForcingError(f"no recipe {name!r}; {nearest(name, RECIPES)}")
    return RECIPES[name]
