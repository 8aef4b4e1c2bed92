"""Make src/simforcing/assets/text-minilm.safetensors: the bundled world's prompts in every template.

Needs the extra `text`; run it again when the tasks of the bundled world change:
    .venv/bin/python scripts/make_text_cache.py
"""

from typing import get_args

import numpy as np

from simforcing.model.text import BUNDLED, Domain, MiniLM, prompt
from simforcing.twin.scene import SETTINGS
from simforcing.twin.script import draw_plan

DRAWS = 5000  # per robot; the rarest task comes about once in 100


def tasks() -> list[str]:
    """Every instruction that the bundled world gives, collected from many draws."""
    rng = np.random.default_rng(0)
    found = {draw_plan(rng, chosen, 29).task for chosen in SETTINGS.values() for _ in range(DRAWS)}
    return sorted(found)


def main() -> None:
    """Encode each instruction in each template and replace the bundled file."""
    prompts = [prompt(task, domain) for task in tasks() for domain in get_args(Domain)]
    encoder = MiniLM(caches=())
    encoder.encode(prompts)
    BUNDLED.parent.mkdir(exist_ok=True)
    encoder.save_cache(BUNDLED, prompts)
    print(f"{BUNDLED.name}: {len(prompts)} prompts, {BUNDLED.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
