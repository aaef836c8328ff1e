"""Test the `no_sync` context, which defers the reduction of gradients."""

from __future__ import annotations

import pytest

from deepseek_zero.base.errors import UsageError
from deepseek_zero.engine.micro_batches import HeldReductions


def test_inside_a_context_a_step_and_another_context_are_refused() -> None:
    held = HeldReductions()
    held.refuse_step()
    with held.inside("no_sync"):
        assert held.name == "no_sync"
        with pytest.raises(UsageError, match=r"illegal to call Engine\.step\(\) inside no_sync"):
            held.refuse_step()
        with pytest.raises(UsageError, match=r"other context manager reentry .* in no_sync"):
            held.inside("other").__enter__()
    held.refuse_step()


def test_an_error_ends_the_context() -> None:
    held = HeldReductions()
    with pytest.raises(KeyError), held.inside("no_sync"):
        raise KeyError
    assert held.name == ""
