"""The training loop of seed 001 with its missing parts: digits, a small network and fp16 ZeRO-3.

    deepseek-zero run --nproc 2 examples/seed_001.py --deepspeed \
        --deepspeed_config examples/seed_001_config.json
    python examples/seed_001.py

The article's configuration is used unchanged and is the default. tests/contract/test_seeds.py
prints the differences with their reasons. SEED_SAMPLES=256 trains on that number of digits.
"""

# ruff: noqa
# fmt: off
import argparse
import os
from pathlib import Path

import deepseek_zero as deepspeed
import torch
from digits import dataset
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

# ... 定义你的模型、数据集、优化器 ...
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("seed_001_config.json")))
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()

device = torch.device("cuda", args.local_rank) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
num_epochs = 5
losses = []

model, optimizer, _, lr_scheduler = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    args=args,  # 你的命令行参数,需要包含deepspeed相关的
    lr_scheduler=lr_scheduler
)

digits = dataset(limit=int(os.environ.get("SEED_SAMPLES", 1_000_000)))
sampler = DistributedSampler(digits, model.world_size, model.global_rank)
dataloader = DataLoader(digits, batch_size=16, sampler=sampler)

for epoch in range(num_epochs):
    sampler.set_epoch(epoch)
    for batch in dataloader:
        inputs, labels = (tensor.to(device) for tensor in batch)
        # ... 前向传播 ...
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        # 反向传播
        model.backward(loss)
        # 优化器步进
        model.step()
        losses.append(loss.item())
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

last = losses[-len(dataloader):]
fall = losses[0] - sum(last) / len(last)
assert fall > 1.5, f"from the first batch to the last epoch the loss fell by {fall:.3f}, less than 1.5 nats"
