"""Hooks refer to their owner weakly and are not copied."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest

from deepseek_zero.base.errors import UsageError
from deepseek_zero.sharding.hooks import Hook, weak_hook


class Owner:
    def add(self, first: int, second: int) -> int:
        return first + second


def test_a_hook_calls_its_function_with_the_owner_and_the_first_arguments() -> None:
    owner = Owner()
    assert weak_hook(owner, Owner.add, 2)(3) == 5


@pytest.mark.parametrize("raises", [True, False])
def test_a_hook_does_not_keep_its_owner_alive(raises: bool) -> None:
    owner = Owner()
    hook = weak_hook(owner, Owner.add, 2, raises_if_gone=raises)
    reference = weakref.ref(owner)
    del owner
    gc.collect()
    assert reference() is None
    if raises:
        with pytest.raises(UsageError, match="after its engine was deleted"):
            hook(3)
    else:
        assert hook(3) is None


def test_a_hook_is_not_copied() -> None:
    with pytest.raises(UsageError, match="deepcopy of a wrapped model is not possible"):
        copy.deepcopy(Hook(print))
