"""Prediction: one sampler for both stages."""
