"""Load checkpoints that this library wrote with genuine DeepSpeed, and verify their content.

    DS_ACCELERATOR=cpu python tests/data/deepspeed/load.py FOLDER CASE ...

FOLDER/CASE is a checkpoint that an engine of two ranks saved with `checkpoint.layout: "deepspeed"`
after two steps of make.py's training. FOLDER/CASE.pt has its full main weights, both moments, and
the losses of the next two steps on rank 0's data. Run it by hand where DeepSpeed is installed. CI
compares files instead (tests/unit/compat/deepspeed/checkpoint/test_writer.py).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from make import CASES, config, small, train


def _rank(rank: int, folder: str, cases: list[str]) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
    }
    get_accelerator().is_fp16_supported = lambda: True  # as in make.py
    dist.init_process_group("gloo", rank=rank, world_size=2)
    deepspeed.init_distributed("gloo")
    for case in cases:
        told = torch.load(Path(folder) / f"{case}.pt", weights_only=True)
        engine = deepspeed.initialize(model=small(6), config=config(**CASES[case]))[0]
        path, client = engine.load_checkpoint(str(Path(folder) / case))
        wrong = []
        link = getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:  # otherwise the first step does it
            link()
        for name, param in engine.module.named_parameters():
            if not (param.requires_grad and CASES[case]["stage"]):
                continue
            found = {name: safe_get_full_fp32_param(param)}
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {key}"] = safe_get_full_optimizer_state(param, key)
            wrong += [each for each, value in found.items() if not torch.equal(value, told[each])]
        losses = torch.tensor(train(engine, 2, 4, rank))
        if rank == 0:
            far = (losses - told["losses"]).abs().max().item()
            seen = f"{Path(path).name}, epoch {client.get('epoch')}, differing states {wrong}"
            sys.stderr.write(f"RESULT {case}: {seen}, losses {far:.1e} apart\n")
    dist.barrier()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_PORT", "29518")
    torch.multiprocessing.spawn(_rank, (sys.argv[1], sys.argv[2:]), nprocs=2)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for case in sys.argv[2:]:
        if CASES[case]["stage"]:
            state = get_fp32_state_dict_from_zero_checkpoint(f"{sys.argv[1]}/{case}")
            told = torch.load(Path(sys.argv[1]) / f"{case}.pt", weights_only=True)
            wrong = [
                name
                for name, value in state.items()
                if not torch.equal(value.float(), told[name].float())
            ]
            sys.stderr.write(
                f"RESULT {case}: zero_to_fp32 finds {len(state)} tensors, differing {wrong}\n"
            )
