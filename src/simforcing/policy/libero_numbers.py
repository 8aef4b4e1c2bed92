"""How LIBERO's numbers become a policy's, and back.

Legend: N steps, A steps of a chunk. An action has 7 numbers: position (3), rotation vector (3), gripper; a state 8:
end-effector position in metres (3), its orientation as axis times angle in radians (3), positions of both fingers in
metres (2). (FastWAM, its LIBERO configuration.)

In the recordings a gripper of 1 is open and 0 closed; LIBERO's environment takes -1 for open and +1 for close.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Float32

from simforcing.errors import InputError, check_shape

Array = np.ndarray[Any, np.dtype[Any]]

GRIPPER = 6
"""The gripper's place among the numbers of an action."""

FINGERS_APART = 0.08
"""Distance of the open fingers in metres."""

STAY_OPEN = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
"""The environment's action that moves nothing and holds the gripper open."""


def axis_angle(quaternion: Float[Array, "*N 4"]) -> Float[Array, "*N 3"]:
    """Axis times angle, in radians, of unit quaternions in x, y, z, w order.

    The angle is in [0, 2 pi]: a quaternion and its negative, the same rotation, give different numbers, as in the
    recordings. A w beyond 1 is taken as 1; without a rotation there is no axis, so the result is zero.
    """
    check_shape("quaternion", quaternion, [*quaternion.shape[:-1], 4])
    w = np.clip(quaternion[..., 3:], -1.0, 1.0)
    sine = np.sqrt(1.0 - w * w)
    turned = sine > 0
    found: Array = np.where(turned, quaternion[..., :3] * (2.0 * np.arccos(w)) / np.where(turned, sine, 1.0), 0.0)
    return found


def proprioception(
    position: Float[Array, "*N 3"], quaternion: Float[Array, "*N 4"], fingers: Float[Array, "*N 2"]
) -> Float32[Array, "*N 8"]:
    """The state that a policy is given, before it is normalised.

    Raises:
        InputError: a value is missing, NaN or infinite.
    """
    check_shape("position", position, [*position.shape[:-1], 3])
    check_shape("fingers", fingers, [*fingers.shape[:-1], 2])
    state = np.concatenate([position, axis_angle(quaternion), fingers], axis=-1).astype(np.float32)
    if not np.isfinite(state).all():
        raise InputError(f"the robot's state holds NaN or infinite values: {state.tolist()}")
    return state


def from_recording(recorded: Float[Array, "*A 7"], binarise: bool = True) -> Float32[Array, "*A 7"]:
    """What the environment is given for actions as they are recorded; nothing is clipped, its controller limits them.

    binarise: the gripper becomes -1 or +1 (0 if it is exactly half open, which moves it neither way).
    """
    check_shape("recorded", recorded, [*recorded.shape[:-1], GRIPPER + 1])
    action = recorded.astype(np.float32)
    gripper = -(2 * action[..., GRIPPER] - 1)
    action[..., GRIPPER] = np.sign(gripper) if binarise else gripper
    return action


def to_recording(action: Float[Array, "*A 7"]) -> Float32[Array, "*A 7"]:
    """Inverse of `from_recording` without `binarise`."""
    check_shape("action", action, [*action.shape[:-1], GRIPPER + 1])
    recorded = action.astype(np.float32)
    recorded[..., GRIPPER] = (1 - recorded[..., GRIPPER]) / 2
    return recorded
