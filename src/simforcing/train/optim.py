"""The optimiser, the average of the weights, and steps that are skipped without waiting for a device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simforcing.model.world_model import WorldModel
from simforcing.train.config import TrainConfig


def make_optimizer(model: WorldModel, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay; norms, biases and modulations do not; what gets no gradient is frozen and left out.

    Its state is there from the start, so that a checkpoint of any step can be loaded into it.
    """
    freeze_unused(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = config.weight_decay if parameter.ndim > 1 and "scale_shift_table" not in name else 0.0
            scale = config.sim_lr_scale if name.startswith("sim.") else 1.0
            groups.setdefault((decay, scale), []).append(parameter)
    described = [{"params": p, "weight_decay": d, "scale": s} for (d, s), p in groups.items()]
    optimizer = torch.optim.AdamW(described, lr=config.lr, betas=config.betas, eps=1e-8, fused=True)
    for p in parameters(optimizer):
        moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device), **moments}
    return optimizer


def freeze_unused(model: WorldModel) -> None:
    """What the output does not depend on is not trained."""
    for _, parameter in model.unused_parameters():
        parameter.requires_grad_(False)


def parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Those that it steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies in this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clipped_norm(optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
    """Norm of all gradients, over all processes, before they were scaled down to at most `limit`."""
    norm = nn.utils.clip_grad_norm_(parameters(optimizer), limit)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def step_unless(bad: Tensor, optimizer: torch.optim.AdamW) -> None:
    """One step, or where `bad` (on the device) nothing at all; gradients are gone afterwards.

    The fused kernel reads the flag where it lies, as it does for gradient scaling.
    """
    optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad()


class Average:
    """Exponential moving average of what is trained."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.values = {name: p.detach().clone() for name, p in self.trained.items()}

    def update(self) -> None:
        """Takes in the weights as they are now."""
        mine, theirs = ([local(t.detach()) for t in d.values()] for d in (self.values, self.trained))
        torch._foreach_lerp_(mine, theirs, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the average as its weights."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """The average becomes the weights, and the other way round."""
        for name, parameter in self.trained.items():
            mine, theirs = local(self.values[name]), local(parameter)
            kept = theirs.clone()
            theirs.copy_(mine)
            mine.copy_(kept)
