"""Everything that speaks DeepSpeed's words: its functions, names, arguments, files and the package
of its name.
"""
