"""Training: objective, data, loop, checkpoints."""
