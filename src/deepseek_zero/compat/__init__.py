"""Compatibility with other libraries, one package for each.

No other package imports this one.
"""
