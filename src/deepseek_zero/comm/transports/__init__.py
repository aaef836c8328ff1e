"""Transports that move flat tensors between ranks, one per file."""
