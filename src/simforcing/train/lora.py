"""Low-rank adapters: projections of all blocks stay as they are, what is learnt is a product of two thin matrices.

Written out here, because the teacher is the frozen part of its student: both can hold the same weights, once
(`share_frozen`), which an adapter library that wraps modules would not know. LoRA, arXiv:2106.09685.
"""

import math

import torch
from torch import Tensor, nn

from simforcing.errors import SimForcingError
from simforcing.model.world_model import WorldModel

ALSO_TRAINED = ("sim.", "proprio.")  # small, and new or the student's own
MARK = ".frozen."


class Adapted(nn.Module):
    """A frozen projection plus `up @ down`, which starts at zero."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(rank, linear.in_features))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        added: Tensor = nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        result: Tensor = self.frozen(x)
        return result + added


def add_adapters(model: WorldModel, rank: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    """Adapters on every projection of every block; besides them only `ALSO_TRAINED` is trained.

    dtype: of the projections, which are frozen.

    Raises:
        SimForcingError: the rank is below 1.
    """
    if rank < 1:
        raise SimForcingError(f"rank {rank} of adapters: give at least 1")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(ALSO_TRAINED))
    unused = {name for name, _ in model.unused_parameters()}
    torch.manual_seed(seed)
    for parent_name, parent in list(model.named_modules()):
        for name, module in list(parent.named_children()):
            path = f"{parent_name}.{name}"
            if isinstance(module, nn.Linear) and ".blocks." in path and f"{path}.weight" not in unused:
                setattr(parent, name, Adapted(module.to(dtype), rank))


def merged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model without adapters that computes the same."""
    result = {k.replace(MARK, "."): v for k, v in state.items() if not k.endswith((".up", ".down"))}
    for name in [k.removesuffix(".up") for k in state if k.endswith(".up")]:
        weight = state[f"{name}{MARK}weight"]
        product = state[f"{name}.up"].double() @ state[f"{name}.down"].double()
        result[f"{name}.weight"] = (weight.double() + product).to(weight.dtype)
    return result


def share_frozen(model: WorldModel, teacher: WorldModel) -> None:
    """What is frozen in both, and equal, is kept once, as the teacher's."""
    theirs = dict(teacher.named_parameters())
    for name, parameter in model.named_parameters():
        other = theirs.get(name.replace(MARK, "."))
        if other is None or parameter.requires_grad or parameter.dtype != other.dtype:
            continue
        if torch.equal(parameter.to(other.device), other):
            parameter.data = other.data
