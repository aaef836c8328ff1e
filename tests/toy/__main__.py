"""Makes the library; its path is the last line printed."""

import sys

from tests import toy

sys.stdout.write(f"{toy.make()}\n")
