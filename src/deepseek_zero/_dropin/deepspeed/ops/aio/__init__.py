"""`deepspeed.ops.aio`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.facade.standin import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.facade.builders": "AsyncIOBuilder",
    },
)
