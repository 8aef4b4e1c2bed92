"""Asks a served policy by openpi's own client: metadata, actions, an observation that does not fit, and the next one.

    pip install --no-deps openpi-client
    simforcing policy serve runs/policy/model --port 8123 &
    python tools/check_with_openpi.py --port 8123

Exit code: 0 all answers are as they should be, 1 they are not.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np


def observation(metadata: dict[str, Any]) -> dict[str, Any]:
    """Random pictures and state of the sizes that the server asks for."""
    rng = np.random.default_rng(0)
    seen: dict[str, Any] = {
        key: rng.integers(0, 256, (*size, 3), np.uint8) for key, size in metadata["cameras"].items()
    }
    return seen | {"observation/state": np.zeros(metadata["state"], np.float32), "prompt": "pick up the ketchup"}


def main() -> int:
    """Prints what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    policy = WebsocketClientPolicy(given.host, given.port)
    metadata = policy.get_server_metadata()
    seen, wrong = observation(metadata), list[str]()
    shape = (metadata["action_horizon"], metadata["action_dim"])
    first = policy.infer(seen)
    if first["actions"].shape != shape or not np.isfinite(first["actions"]).all():
        wrong.append(f"actions of shape {first['actions'].shape}, expected {shape}, all finite")
    if "infer_ms" not in first.get("server_timing", {}):
        wrong.append("no server_timing")
    try:
        policy.infer({key: value for key, value in seen.items() if key != "observation/state"})
        wrong.append("an observation without state was answered")
    except RuntimeError as error:
        if "lacks observation/state" not in str(error):
            wrong.append(f"refused for another reason: {error}")
    if not np.array_equal(policy.infer(seen)["actions"], first["actions"]):
        wrong.append("the same observation had another answer after an error")
    print("\n".join(wrong) or f"as openpi's client expects: {metadata['policy']}, actions {shape}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
