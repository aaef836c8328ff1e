"""Checkpoints in DeepSpeed's layout: read, written, and made known to the core by `register_layout`."""
