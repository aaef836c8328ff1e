"""DeepSpeed's data efficiency: curriculum learning.

It is imported only if a configuration enables it.
"""
