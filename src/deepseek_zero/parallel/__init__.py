"""Owns layers that several ranks compute together: products split over the tensor-parallel axis, and what they sum."""
