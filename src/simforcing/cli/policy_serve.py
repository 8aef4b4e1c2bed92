"""`simforcing policy serve`: a policy for robots and simulators that speak openpi's protocol."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from simforcing.errors import SimForcingError, check_seed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from simforcing.policy.serve import Colours, Served


@dataclass(frozen=True, kw_only=True)
class PolicyServe:
    """Serve a policy over websockets, as openpi's servers do; their client (openpi-client) talks to it.

    Example:
      simforcing policy serve runs/policy/model --port 8000

    An observation has 'observation/<camera>' (uint8 RGB, top row first), 'observation/state' and 'prompt'; the answer
    'actions'. What is wrong with an observation is answered as one line of text. There is no encryption and no
    password: on other hosts than this one, put it behind something that has both.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Directory of a policy."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of this machine's."""
    port: int = 8000
    """0 takes one that is free."""
    denoising: int = 10
    """Steps from noise to actions."""
    seed: int = 0
    """Of the noise."""
    noise: Literal["fixed", "fresh"] = "fixed"
    """fixed: every chunk starts from the same noise; fresh: each from noise of its own. A client may send a 'seed'."""
    actions: Literal["recording", "libero"] = "recording"
    """Answer actions as they were recorded, or as LIBERO's environment takes them (gripper -1 open, +1 closed)."""
    data: Path | None = None
    """Dataset that it was trained on: pictures that have red and blue exchanged are then refused."""
    max_mb: float = 16.0
    """Size of a message at most."""
    device: str = "auto"
    """Where the policy runs: cpu, cuda, or auto: a GPU where there is one."""

    def run(self) -> int:
        """Serves until it is interrupted."""
        import asyncio

        from simforcing.policy.serve import PolicyServer

        check_seed(self.seed, "--seed")
        if not 0 <= self.port <= 65535:
            raise SimForcingError(f"--port {self.port}: give 0 to 65535")
        if not 0 < self.max_mb < 4096:
            raise SimForcingError(f"--max-mb {self.max_mb:g}: give more than 0 and less than 4096")
        asyncio.run(self._serve(PolicyServer(self.served(), int(self.max_mb * 1024 * 1024))))
        return 0

    async def _serve(self, server: object) -> None:
        from simforcing.policy.serve import PolicyServer

        assert isinstance(server, PolicyServer)
        listening = await server.start(self.host, self.port)
        where = ", ".join(f"ws://{s.getsockname()[0]}:{s.getsockname()[1]}" for s in listening.sockets)
        print(f"serving {self.checkpoint} at {where}; stop with Ctrl-C", flush=True)
        await listening.serve_forever()

    def served(self) -> Served:
        """The policy with all that clients are told of it.

        Raises:
            SimForcingError: it is none, or does not say what it looks at.
        """
        from simforcing.evaluate.measure import weights_hash
        from simforcing.model.device import pick_device
        from simforcing.policy.libero_numbers import GRIPPER, from_recording
        from simforcing.policy.policy import Policy
        from simforcing.policy.preparation import PolicyPreparation
        from simforcing.policy.serve import Served

        if self.denoising < 1:
            raise SimForcingError(f"--denoising {self.denoising}: give at least 1")
        policy = Policy.from_pretrained(self.checkpoint)
        config, preparation = policy.config, policy.preparation
        if not isinstance(preparation, PolicyPreparation) or not preparation.cameras:
            raise SimForcingError(
                f"{self.checkpoint}: does not say which cameras it looks at; train it with 'policy train'"
            )
        if self.actions == "libero" and config.action_dim != GRIPPER + 1:
            raise SimForcingError(f"--actions libero: actions have {config.action_dim} numbers, LIBERO's {GRIPPER + 1}")
        return Served(
            policy=policy.to(pick_device(self.device)).eval(),
            cameras=preparation.cameras,
            state=config.proprio_dim,
            horizon=config.horizon,
            action=config.action_dim,
            steps=self.denoising,
            seed=self.seed,
            fresh=self.noise == "fresh",
            colours={} if self.data is None else _colours(self.data, preparation.cameras),
            convert=from_recording if self.actions == "libero" else None,
            about={
                "policy": self.checkpoint.name,
                "policy_sha256": weights_hash(policy),
                "variant": config.variant,
                "actions": self.actions,
            },
        )


def _colours(data: Path, cameras: Mapping[str, object]) -> dict[str, Colours]:
    """Mean colours of a dataset's cameras, of some frames of its first episodes."""
    import numpy as np

    from simforcing.data import open_dataset
    from simforcing.policy.serve import Colours

    dataset = open_dataset(data)
    if missing := [key for key in cameras if key not in dataset.cameras]:
        raise SimForcingError(f"{data}: has no camera {missing[0]}, only {', '.join(dataset.cameras)}")
    found = {}
    for key in cameras:
        episodes = [dataset[i] for i in np.unique(np.linspace(0, len(dataset) - 1, 8).astype(int))]
        picks = [episode.frames(key, [0, episode.length // 2, episode.length - 1]) for episode in episodes]
        means = np.concatenate(picks).astype(np.float64).mean((1, 2)) / 255
        found[key] = Colours(means.mean(0), means.std(0))
    return found
