"""DeepSpeed's `deepspeed.git_version_info`: the version and the available ops."""

from __future__ import annotations

from .module_stub import VERSION
from .ops import __compatible_ops__

version = VERSION
git_hash = git_branch = "unknown"
installed_ops = __compatible_ops__
accelerator_name = ""
torch_info = {
    "version": "0.0",
    "bf16_support": False,
    "cuda_version": "0.0",
    "nccl_version": "0.0",
    "hip_version": "0.0",
}
