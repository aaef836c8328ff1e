"""GPU tests fail because of this library and not because of warnings of other packages.

Compilers, drivers and plugins of a GPU machine emit unrelated warnings: Inductor reports that TF32
is available, for example. A warning from our own code is also an error here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FILTERS = (
    "default",
    "error:::deepseek_zero",
    "error:::tests",
    "error::pytest.PytestUnraisableExceptionWarning",
    "error::pytest.PytestUnhandledThreadExceptionWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(*FILTERS))
