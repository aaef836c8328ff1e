"""deepseek_zero under DeepSpeed's name, for programs that import `deepspeed` (deepseek_zero's
docs/how-to/clients.md).

Nothing here does anything: this module and those below it are made of two tables, of what
deepseek_zero provides and of every name that DeepSpeed has; they load on first use.
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
