"""The plan of a run, made from names, shapes, dtypes and settings alone.

Planning uses no tensor, no process group and no clock.
"""
