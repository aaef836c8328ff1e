"""The program of seed 002: ResNet-101 on CIFAR-10 through DeepSpeed's API, with ZeRO-3 and fp16.

    deepseek-zero run --nproc 2 examples/seed_002.py
    python examples/seed_002.py

tests/contract/test_seeds.py prints the differences from the article with their reasons. Nothing is
downloaded: without CIFAR-10's files in ./data the images are scikit-learn's digits. For a run of a
minute use SEED_SAMPLES=64 SEED_BATCH=16 SEED_LR=3e-3, because the article's warm-up takes 500 steps
and such a run has 20.
"""

# ruff: noqa
# fmt: off
import os
import torch
import torch.nn as nn
import torch.optim as optim
import vision
import vision as transforms
import deepseek_zero as deepspeed
from torch.utils.data.distributed import DistributedSampler
from torch.nn.parallel import DistributedDataParallel as DDP

# 初始化 DeepSpeed 和分布式训练环境
deepspeed.init_distributed()
local_rank = torch.distributed.get_rank()
world_size = torch.distributed.get_world_size()
cuda = torch.cuda.is_available()
device = torch.device('cuda', local_rank) if cuda else torch.device('cpu')

# 数据预处理
transform = transforms.Compose([
    transforms.RandomCrop(32, padding=4),
    transforms.RandomHorizontalFlip(),
    transforms.ToTensor(),
    transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
])
# 加载数据集
trainset = vision.CIFAR10(root='./data', train=True, transform=transform)
trainset = torch.utils.data.Subset(trainset, range(int(os.environ.get('SEED_SAMPLES', len(trainset)))))
train_sampler = DistributedSampler(trainset, num_replicas=world_size, rank=local_rank)
trainloader = torch.utils.data.DataLoader(trainset, batch_size=int(os.environ.get('SEED_BATCH', 128)),
                                          sampler=train_sampler)
# 加载 ResNet101 模型
torch.manual_seed(0)
model = vision.resnet101(pretrained=False)
num_ftrs = model.fc.in_features
model.fc = nn.Linear(num_ftrs, 10)
model = model.to(device)
# 定义损失函数和优化器
criterion = nn.CrossEntropyLoss()
parameters = filter(lambda p: p.requires_grad, model.parameters())

# DeepSpeed 配置
config = {
    "fp16": {
        # Few CPUs have fp16 arithmetic: without it a convolution takes roughly 10 to 70 times its
        # fp32 time (AVX-512, torch 2.13).
        "enabled": cuda,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1
    },
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": 0.0001,
            "weight_decay": 0.01
        }
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": float(os.environ.get('SEED_LR', 0.0001)),
            "warmup_num_steps": 500
        }
    },
    "zero_optimization": {
        "stage": 3,  # 启用ZeRO-3阶段
        "offload_optimizer": {
            "device": "cpu"
        },
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True
    }
}

# 初始化 DeepSpeed 引擎
model, optimizer, _, _ = deepspeed.initialize(
    model=model,
    model_parameters=parameters,
    config=config
)
losses = []
# 训练模型
for epoch in range(10):
    train_sampler.set_epoch(epoch)
    running_loss = 0.0
    for i, data in enumerate(trainloader, 0):
        inputs, labels = data[0].to(device), data[1].to(device)
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        model.backward(loss)
        model.step()
        running_loss += loss.item()
    print(f'[Epoch {epoch + 1}] Loss: {running_loss / len(trainloader)}')
    losses.append(torch.tensor(running_loss / len(trainloader) / world_size))
    deepspeed.comm.all_reduce(losses[-1])
print('Finished Training')
first, last = sum(losses[:3]) / 3, sum(losses[-3:]) / 3
assert first - last > 0.1, f'the loss fell by {first - last:.3f}, less than 0.1 nats'
