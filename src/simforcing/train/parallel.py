"""Processes that train together under `torchrun`: one alone, DDP, or FSDP2; and what they must agree on.

Everything goes through `Unit.forward` (model/experts.py): the model is called with the loss as its work, a block with
the block's arithmetic, so the wrappers see calls although no network here has a forward of its own.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from simforcing.errors import SimForcingError
from simforcing.model.experts import Block
from simforcing.model.world_model import WorldModel, load_strictly
from simforcing.train.lora import merged, share_frozen

Kind = Literal["none", "ddp", "fsdp"]
T = TypeVar("T")
M = TypeVar("M", bound=WorldModel)
BYTES_A_PARAMETER = 16  # float32 weights, gradients and both moments


@dataclass(frozen=True)
class Team:
    """This process among those that train together; alone by default."""

    rank: int = 0
    size: int = 1
    kind: Kind = "none"
    device: torch.device = torch.device("cpu")

    @property
    def main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no process group."""
        return self.kind == "none"

    def agreed(self, seconds: float, stop: bool) -> tuple[float, bool]:
        """The main process's clock, and whether anybody was asked to stop. On the host: no device is waited for."""
        if self.alone:
            return seconds, stop
        values = torch.tensor([seconds if self.main else 0.0, float(stop)], dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return float(values[0]), bool(values[1])

    def mean(self, values: Tensor) -> Tensor:
        """Over the processes."""
        return values if self.alone else self.sum(values) / self.size

    def sum(self, values: Tensor) -> Tensor:
        """Over the processes."""
        if not self.alone:
            dist.all_reduce(values)
        return values

    def gathered(self, value: T) -> list[T]:
        """What every process has, by rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return cast(list[T], values)

    def on_main(self, work: Callable[[], T]) -> T:
        """The main process's result, for all.

        Raises:
            SimForcingError: in the others, if the work failed; in the main process its own error.
        """
        failure: BaseException | None = None
        found: list[Any] = [None, None]
        if self.main:
            try:
                found[0] = work()
            except BaseException as error:
                failure, found[1] = error, f"{error}"
        if not self.alone:
            dist.broadcast_object_list(found)
        if failure is not None:
            raise failure
        if found[1] is not None:
            raise SimForcingError(found[1])
        return cast(T, found[0])


@contextmanager
def assembled(parallel: Literal["auto"] | Kind, device: torch.device, parameters: int = 0) -> Iterator[Team]:
    """The team that `torchrun` started, or this process alone. `parameters`: of the model, for `auto`.

    auto: DDP where weights, gradients and moments leave three quarters of a GPU's memory to activations, else FSDP2.

    Raises:
        SimForcingError: several processes were started and are to train without each other.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and parallel == "none":
        raise SimForcingError(f"{size} processes with --parallel none: start one, or use ddp or fsdp")
    if size == 1 and parallel in ("auto", "none"):
        yield Team(device=device)
        return
    kind = parallel if parallel != "auto" else _fitting(parameters, device)
    rank = int(os.environ.get("RANK", "0"))
    backend = "gloo"
    if device.type == "cuda":
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield Team(rank, size, kind, device)
    finally:
        dist.destroy_process_group()


def _fitting(parameters: int, device: torch.device) -> Kind:
    if device.type != "cuda":
        return "ddp"
    memory = torch.cuda.get_device_properties(device).total_memory
    return "ddp" if 4 * BYTES_A_PARAMETER * parameters < memory else "fsdp"


# -- arranging a model ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrangement:
    """How a step is computed; changes no more than its rounding, save for `compute`.

    compute: type of activations and of the weights that they meet; masters, gradients and moments stay float32.
    recompute: a block keeps its input only, and is computed again in the backward pass.
    """

    compute: torch.dtype = torch.float32
    recompute: bool = False


def arranged(
    model: WorldModel, teacher: WorldModel | None, team: Team, arrangement: Arrangement = Arrangement()
) -> nn.Module:
    """What is to be called with the work of a training step; `model` itself becomes what is optimised.

    The teacher is kept in the computing type, whole or sharded.
    """
    compute, networks = arrangement.compute, [model]
    if teacher is not None:
        networks.append(teacher.eval().requires_grad_(False).to(compute))
    if team.kind == "fsdp":
        mesh = init_device_mesh(team.device.type, (team.size,))
        for network in networks:
            shard(network, mesh, MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False))
    else:
        if teacher is not None:
            share_frozen(model, teacher.to(team.device))
        model.to(team.device)
    casts = team.kind != "fsdp" and compute != torch.float32
    for block in blocks(model):
        cast_block = [_cast(_inside(block), compute)] if casts else []
        block.around = _chained([_recomputed, *cast_block] if arrangement.recompute else cast_block)
    if casts:
        model.around = _cast(_outside(model), compute)
    return DistributedDataParallel(model) if team.kind == "ddp" else model


def blocks(model: WorldModel) -> list[Block]:
    """Of both experts."""
    return [*model.action.layers, *model.video.layers]


def shard(model: WorldModel, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """FSDP2 by block. A block's projections of text are groups of their own, because they are used before it is."""
    # Nothing here writes into a unit's result, which is what this warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for block in blocks(model):
        fully_shard(_text_projections(block), mesh=mesh, mp_policy=policy)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def _text_projections(block: Block) -> list[nn.Module]:
    """In the order in which they are called."""
    return [block.attn2.to_k, block.attn2.norm_k, block.attn2.to_v]


def accumulating(trained: nn.Module, last: bool) -> AbstractContextManager[None]:
    """For one backward pass of several: DDP averages gradients in the last only. FSDP2 adds up what it has sharded."""
    if isinstance(trained, DistributedDataParallel) and not last:
        return cast(AbstractContextManager[None], trained.no_sync())
    return nullcontext()


def whole(model: M, team: Team) -> M:
    """A plain copy of a trained model on the host, float32, with adapters merged; without weights where not `main`.

    All processes must ask.
    """
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if team.main:
            state[name] = full.detach().to("cpu", torch.float32, copy=True)
    with torch.device("meta"):
        copy = type(model)(model.config, model.preparation)
    if team.main:
        load_strictly(copy, merged(state), "the trained model")
    return copy.eval()


# -- what is put around the work of a unit --------------------------------------------------------------------------

Around = Callable[..., Any]
Slots = list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]]


def _recomputed(work: Callable[..., T], *args: Any) -> T:
    result: T = checkpoint(work, *args, use_reentrant=False, preserve_rng_state=False)
    return result


def _cast(slots: Slots, dtype: torch.dtype) -> Around:
    """Inside, these parameters are copies in another type; gradients go to the originals."""

    def around(work: Callable[..., T], *args: Any) -> T:
        try:
            for own, name, parameter in slots:
                own[name] = cast(nn.Parameter, parameter.to(dtype))
            return work(*args)
        finally:
            for own, name, parameter in slots:
                own[name] = parameter

    return around


def _chained(arounds: Sequence[Around]) -> Around | None:
    """The first outermost."""
    if not arounds:
        return None
    if len(arounds) == 1:
        return arounds[0]
    first, second = arounds
    return lambda work, *args: first(lambda *a: second(work, *a), *args)


def _inside(block: Block) -> Slots:
    """Parameters that are used within a call of the block."""
    text = {id(p) for module in _text_projections(block) for p in module.parameters()}
    return [slot for slot in _slots(block) if id(slot[2]) not in text]


def _outside(model: WorldModel) -> Slots:
    """All others."""
    inside = {id(p) for block in blocks(model) for *_, p in _inside(block)}
    return [slot for slot in _slots(model) if id(slot[2]) not in inside]


def _slots(module: nn.Module) -> Slots:
    return [(m._parameters, name, p) for m in module.modules() for name, p in m._parameters.items() if p is not None]
