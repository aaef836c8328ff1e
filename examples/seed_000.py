"""The program of seed 000 with its missing parts: random tokens and a small Transformer, with
ZeRO-3.

    deepseek-zero run --nproc 2 examples/seed_000.py
    python examples/seed_000.py

tests/contract/test_seeds.py prints the differences from the article with their reasons. The article
does not define `num_epochs`; with 3 epochs the random labels can be learned. SEED_SAMPLES=4 trains
on four of the hundred samples.
"""

# ruff: noqa
# fmt: off
import os

import torch
from deepseek_zero import DeepSeekZeRO3, comm
from deepseek_zero.optimizer import ZeroOptimizer

class SimpleTransformer(torch.nn.Module):
    def __init__(self, vocab_size, d_model, nhead, num_layers):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, d_model)
        self.transformer = torch.nn.Transformer(d_model=d_model, nhead=nhead, num_encoder_layers=num_layers, num_decoder_layers=num_layers)
        self.fc = torch.nn.Linear(d_model, vocab_size)
    
    def forward(self, src, tgt):
        src_emb = self.embedding(src)
        tgt_emb = self.embedding(tgt)
        output = self.transformer(src_emb, tgt_emb)
        output = self.fc(output)
        return output

# 模型参数设置
vocab_size = 10000
d_model = 512
nhead = 8
num_layers = 6

# 创建模型实例
model = SimpleTransformer(vocab_size, d_model, nhead, num_layers)

# 初始化 DeepSeek ZeRO-3
zero_config = {
    'optimizer': 'adam',  # 选择优化器类型
    'lr': 1e-4,          # 学习率
    'stage': 3,          # 设置为 ZeRO-3 阶段
    'dp_degree': 2,      # 数据并行度
    'pp_degree': 1,      # 管道并行度
    'mp_degree': 1       # 模型并行度
}
zero = DeepSeekZeRO3(model, **zero_config)

# 定义损失函数
criterion = torch.nn.CrossEntropyLoss()

# 配置优化器
optimizer = ZeroOptimizer(model.parameters(), lr=zero_config['lr'], optimizer_type=zero_config['optimizer'])

# 训练数据准备(示例数据)
train_data = torch.randint(0, vocab_size, (100, 10))
train_labels = torch.randint(0, vocab_size, (100, 10))
train_data = train_data[:int(os.environ.get('SEED_SAMPLES', 100))]
num_epochs = 3
losses = []

# 训练循环
for epoch in range(num_epochs):
    for batch_idx in range(len(train_data)):
        data = train_data[batch_idx].unsqueeze(0)
        labels = train_labels[batch_idx].unsqueeze(0)
        
        outputs = model(data, data)
        loss = criterion(outputs.view(-1, vocab_size), labels.view(-1))
        
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        
        losses.append(loss.item())
        if batch_idx % 10 == 0:
            print(f'Epoch [{epoch+1}/{num_epochs}], Batch [{batch_idx}/{len(train_data)}], Loss: {loss.item():.4f}')

# 保存模型
# Every rank calls state_dict(): under ZeRO-3 it gathers full tensors from all of them.  One rank
# writes, because two writers of one file spoil it; the barrier keeps the others from going on (to
# load it, or to exit) before it is whole.
state = model.state_dict()
if comm.get_rank() == 0: torch.save(state, 'model.pth')
comm.barrier()

# 加载模型
# model.load_state_dict(torch.load('model.pth'))

first, last = (sum(part) / len(train_data) for part in (losses[:len(train_data)], losses[-len(train_data):]))
print(f'mean loss: {first:.3f} in the first epoch, {last:.3f} in the last')
assert first - last > 1.0, 'the loss fell by less than 1 nat'
