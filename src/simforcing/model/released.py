"""Names and layout of the authors' checkpoints, in our names.

The authors' file is `{"mot": state, "proprio_encoder": state, ...}`; flattened here as `mot.<key>` and
`proprio_encoder.<key>`.
"""

import re
from collections.abc import Mapping

from torch import Tensor

# Order matters: the first rule that matches a name is applied.
_BLOCK = (
    (r"\.modulation$", ".scale_shift_table"),
    (r"\.self_attn\.([qkv])\.", r".attn1.to_\1."),
    (r"\.self_attn\.o\.", ".attn1.to_out.0."),
    (r"\.self_attn\.", ".attn1."),
    (r"\.cross_attn\.([qkv])\.", r".attn2.to_\1."),
    (r"\.cross_attn\.o\.", ".attn2.to_out.0."),
    (r"\.cross_attn\.", ".attn2."),
    (r"\.norm3\.", ".norm2."),
    (r"\.ffn\.0\.", ".ffn.net.0.proj."),
    (r"\.ffn\.2\.", ".ffn.net.2."),
)
_RULES = (
    (r"^video\.blocks\.(\d+)\.sim_cond_conv\.", r"sim.blocks.\1."),
    (r"\.text_embedding\.0\.", ".condition_embedder.text_embedder.linear_1."),
    (r"\.text_embedding\.2\.", ".condition_embedder.text_embedder.linear_2."),
    (r"\.time_embedding\.0\.", ".condition_embedder.time_embedder.linear_1."),
    (r"\.time_embedding\.2\.", ".condition_embedder.time_embedder.linear_2."),
    (r"\.time_projection\.1\.", ".condition_embedder.time_proj."),
    (r"^video\.head\.head\.", "video.proj_out."),
    (r"^video\.head\.modulation$", "video.scale_shift_table"),
    *_BLOCK,
)


def our_name(key: str) -> str:
    """Our parameter name for a key `mot.<...>` or `proprio_encoder.<...>` of the authors."""
    name = key.removeprefix("mot.").removeprefix("mixtures.").replace("proprio_encoder.", "proprio.")
    for pattern, replacement in _RULES:
        renamed, n = re.subn(pattern, replacement, name)
        if n:
            return renamed
    return name


def our_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The authors' flattened state dict under our names."""
    return {our_name(k): v for k, v in state.items()}
