"""`deepspeed.ops.sparse_attention.sparse_self_attention`, under DeepSpeed's path.

No logic: names and where they live.
"""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.compat.deepspeed.sparse_attention": "SparseSelfAttention",
    },
)
