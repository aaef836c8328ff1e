"""The plan of a run, made only from names, shapes, dtypes and settings.

Planning uses no tensor, no process group and no clock.
"""
