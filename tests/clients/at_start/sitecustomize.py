"""Python imports this as it starts with this folder on its path: for the page about Lightning,
without CUDA.
"""

import sys

if sys.argv[:1] != ["-m"]:  # a script's interpreter, not a launcher's
    from tests.clients.lightning_gate import lift

    lift()
