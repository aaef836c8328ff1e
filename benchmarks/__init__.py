"""Side by side on CPU ranks: this library, its peers and the floor none of them can beat.  See
README.md.
"""
