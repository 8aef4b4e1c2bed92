"""The simulated twin: robot, replay, rendering. Importing it chooses MuJoCo's renderer, best before MuJoCo comes.

Without `MUJOCO_GL` on Linux it takes EGL, or else OSMesa, whichever library the machine has.
"""

import ctypes
import importlib
import os
import sys

from simforcing.errors import SimForcingError

DEBIAN_PACKAGES = "libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6"
_LIBRARIES = {"egl": ("libEGL.so.1",), "osmesa": ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so")}


def _loads(renderer: str) -> bool:
    """Whether a shared library of `renderer` can be opened."""
    for name in _LIBRARIES[renderer]:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


def _choose_renderer() -> None:
    """Set `MUJOCO_GL` to the first renderer that is installed, unless it is set or this is no Linux.

    Raises SimForcingError where it is set to one whose library is missing: MuJoCo could not even be imported.
    """
    if not sys.platform.startswith("linux"):
        return
    wanted = os.environ.get("MUJOCO_GL", "").strip().lower()
    if wanted in _LIBRARIES and not _loads(wanted):
        raise SimForcingError(
            f"MUJOCO_GL is {wanted}, but its library does not load; install {DEBIAN_PACKAGES} "
            "(Debian names), or unset MUJOCO_GL"
        )
    for renderer in _LIBRARIES:
        if not wanted and _loads(renderer):
            os.environ["MUJOCO_GL"] = renderer
            break
    chosen_at_import = sys.modules.get("mujoco.rendering.classic.gl_context")
    if chosen_at_import is not None:  # MuJoCo came first and looked before the variable was set
        importlib.reload(chosen_at_import)


_choose_renderer()
