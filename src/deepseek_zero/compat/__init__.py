"""Other libraries' words for what this one does, one package for each; nothing below imports from
here.
"""
