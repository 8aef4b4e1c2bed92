"""Where a model computes."""

import torch

from simforcing.errors import SimForcingError


def pick_device(name: str = "auto") -> torch.device:
    """`auto`: a CUDA device if there is one, else the CPU; otherwise the device of this name.

    Raises:
        SimForcingError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise SimForcingError(f"device {name!r} cannot be used ({reason}); give cpu, cuda or auto") from error
    if device.type not in ("cpu", "cuda"):
        raise SimForcingError(f"device {name!r}: give cpu, cuda or auto")
    return device
