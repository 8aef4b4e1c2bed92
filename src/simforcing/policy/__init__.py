"""A policy: actions are denoised by the action expert of a world model, looking at its video expert."""
