"""Build the library and print its path in the last line."""

import sys

from tests import toy

sys.stdout.write(f"{toy.make()}\n")
