"""Select ZeRO-3 leaf modules by class, name and suffix."""

from __future__ import annotations

from torch import nn

from deepseek_zero.utils import (
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
)


def test_a_single_name_and_a_generator_select_what_a_list_selects() -> None:
    model = nn.ModuleDict({"mlp": nn.Linear(2, 2), "help": nn.Tanh(), "m": nn.Tanh()})
    assert set_z3_leaf_modules(model, nn.Linear) == [model["mlp"]]
    assert unset_z3_leaf_modules(model, "Linear") == [model["mlp"]]
    assert set_z3_leaf_modules(model, (name for name in ["Linear"])) == [model["mlp"]]
    unset_z3_leaf_modules(model, (kind for kind in [nn.Linear]))
    assert set_z3_leaf_modules_by_suffix(model, "lp") == ([model["mlp"], model["help"]], [])
    assert set_z3_leaf_modules_by_name(model, (name for name in ["m", "x"]), False) == (
        [model["m"]],
        ["x"],
    )
    assert len(get_z3_leaf_modules(model)) == 3
