"""Drop-in package for programs that import `deepspeed`.

See docs/how-to/clients.md of deepseek_zero.

This module and its submodules are generated from two tables: the names that deepseek_zero provides,
and all names of DeepSpeed. They are loaded on first use.
"""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import VERSION as __version__
from deepseek_zero.compat.deepspeed.module_stub import begin, names_of

__all__ = ["__version__"]

__version_major__ = 0
__version_minor__ = 19
__version_patch__ = 8
__git_hash__ = __git_branch__ = None

__getattr__, __dir__ = names_of(__name__)
begin()
