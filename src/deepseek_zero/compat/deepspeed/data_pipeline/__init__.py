"""DeepSpeed's data efficiency: samples by difficulty (curricula).  Imported where a configuration
asks for it.
"""
