"""What to say where a machine has no OpenGL to draw with."""

import os

from simforcing.errors import SimForcingError
from simforcing.twin import DEBIAN_PACKAGES


def no_renderer(error: BaseException) -> SimForcingError:
    """The one line for whatever OpenGL's layers raised: the reason, and the Debian packages that help."""
    chosen = os.environ.get("MUJOCO_GL", "").strip() or "none"
    reason = " ".join(str(error).split()) or type(error).__name__
    return SimForcingError(
        f"no OpenGL renderer (MUJOCO_GL is {chosen}: {reason}); install {DEBIAN_PACKAGES} "
        "(Debian names), or set MUJOCO_GL to egl or osmesa before Python starts"
    )
