"""Optimizers and learning-rate schedules that PyTorch does not have, by name."""
