"""What the process imports that ranks are forked off (tests/rank_pool.py): it need not be imported
in each of them.

It must compute nothing and start no thread: no thread survives a fork.
"""

from __future__ import annotations

import gc
from contextlib import suppress

import deepseek_zero
import tests.rank_pool  # noqa: F401
import tests.training  # noqa: F401

assert deepseek_zero.initialize, "asked for, since names of the package are imported when they are"
with suppress(ImportError):
    from transformers import LlamaForCausalLM  # noqa: F401

gc.collect()
gc.freeze()  # a rank's collector looks at what its tests make, and leaves these pages shared
