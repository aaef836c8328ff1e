"""Python imports this module at start if this folder is on its path.

It lets the commands of the page about Lightning run without CUDA.
"""

import sys

if sys.argv[:1] != ["-m"]:  # the interpreter of a script, not of a launcher
    from tests.clients.lightning_gate import lift

    lift()
