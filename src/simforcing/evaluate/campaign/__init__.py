"""The study: every baseline, ablation and sweep on the bundled world, and what it says about each claim."""
