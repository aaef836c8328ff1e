"""The plan of a run, from names, shapes, dtypes and settings alone: no tensor, no process group, no
clock.
"""
