"""The public functions and classes of the library, in its own terms."""
