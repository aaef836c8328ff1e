"""Features that attach to the extension points of the core. The core imports none of them."""
