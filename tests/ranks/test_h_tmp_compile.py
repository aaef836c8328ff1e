import torch, pytest, deepseek_zero
from torch import nn
from tests.plain import here
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a=nn.Linear(40,40)
    def forward(self,x):
        return x+self.a(x).tanh()
@pytest.mark.ranks(2, timeout=250)
def test_c():
    def go(c):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(6,40), nn.Sequential(*[Block() for _ in range(3)]), nn.Linear(40,2))
        e=deepseek_zero.initialize(model=m,config={"train_micro_batch_size_per_gpu":4,"steps_per_print":None,"optimizer":{"type":"SGD","params":{"lr":.1}},"zero_optimization":{"stage":3,"stage3_param_persistence_threshold":0,"stage3_max_live_parameters":0}})[0]
        if c:
            for u in e.runtime.units[1:]:
                u.module.forward = torch.compile(u.module.forward, backend="inductor")
        out=[]
        for s in range(3):
            x=torch.randn(4,6,generator=torch.Generator().manual_seed(s*10+here()))
            l=e(x).square().mean(); e.backward(l); e.step(); out.append(l.item())
        if c:
            import torch._dynamo.utils as du
            print(dict(du.counters["stats"]), dict(du.counters["graph_break"]))
        return out
    import warnings; warnings.simplefilter("ignore")
    a=go(False); b=go(True)
    print(a,b)
    assert a==b
