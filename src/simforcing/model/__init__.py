"""The networks: schedule, codec, text, experts, mixture, simulation condition."""
