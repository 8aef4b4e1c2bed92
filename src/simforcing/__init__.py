"""Action-conditioned robot world models that learn from simulation twice: as a teacher and as a reference."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simforcing.model.world_model import WorldModel

__version__ = "0.1.0"
__all__ = ["WorldModel", "__version__"]


def __getattr__(name: str) -> Any:
    """Import `WorldModel`, and with it torch, only when it is asked for."""
    if name == "WorldModel":
        from simforcing.model.world_model import WorldModel

        return WorldModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, those not imported yet included."""
    return sorted([*globals(), "WorldModel"])
