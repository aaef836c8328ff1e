import pytest, torch, importlib.util, sys
from pathlib import Path
from deepseek_zero.sharding.group import FlatGroup
from deepseek_zero.optim.access import set_full_master
@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage",[0,1,2,3])
def test_w(stage):
    spec=importlib.util.spec_from_file_location("door", str(Path("tests/ranks/test_engine_door.py").resolve())); m=importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
    with pytest.MonkeyPatch.context() as p:
        p.setattr(FlatGroup,"write",lambda self,param,value: set_full_master(param,value))
        m.test_a_whole_state_dict_is_taken_over_on_every_rank(stage)
