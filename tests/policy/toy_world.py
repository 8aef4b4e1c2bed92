"""A world that simulates nothing: what happens in it is the task's instruction. Processes of the tests import it."""

import os
import time

import numpy as np

from simforcing.policy.libero_env import AGENT, WRIST, Seen, Task
from simforcing.policy.libero_numbers import proprioception


class ToyWorld:
    """`easy` is solved after 5 + trial steps, `hard` never; the others end badly at step 4."""

    def __init__(self, task: Task, size: int) -> None:
        self.task, self.size = task, size
        self.made, self.steps, self.trial = 0, 0, 0

    def start(self, trial: int, seed: int) -> None:
        self.trial, self.steps, self.moves = trial, 0, np.zeros(7)

    def step(self, action: np.ndarray) -> bool:
        assert action.shape == (7,)
        self.steps += 1
        self.moves = self.moves + action
        if self.steps == 4:
            if self.task.instruction == "dead":
                os._exit(3)
            if self.task.instruction == "stuck":
                time.sleep(60)
            if self.task.instruction == "broken":
                raise ValueError("a joint\nis lost")
        return self.task.instruction == "easy" and self.steps >= 5 + self.trial

    def look(self) -> Seen:
        picture = np.full((self.size, self.size, 3), self.steps, np.uint8)
        nowhere = self.task.instruction == "nowhere" and self.steps >= 4
        place = np.full(3, np.nan if nowhere else self.trial, np.float64)
        state = proprioception(place, np.array([0.0, 0.0, 0.0, 1.0]), np.full(2, self.trial, np.float64))
        return Seen({AGENT: picture, WRIST: picture}, state)

    def fingerprint(self) -> dict[str, str]:
        return {"simulator": "toy 1", "task": f"hash of {self.task.instruction}"}

    def close(self) -> None:
        self.steps = -1
