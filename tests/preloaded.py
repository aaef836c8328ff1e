"""Import the modules that ranks need before tests/rank_pool.py forks them.

This module must not compute anything or start threads, because no thread survives a fork.
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
# keeps these pages shared, because the collector of a rank does not touch frozen objects
gc.freeze()
