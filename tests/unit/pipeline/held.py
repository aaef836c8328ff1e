"""The gradients that the stages of a pipeline hold, beside those of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def assert_held(
    found: Sequence[Mapping[str, Tensor]],
    expected: Mapping[str, Tensor],
    holders: Callable[[str], int],
    *,
    are_summed: bool,
) -> None:
    """Compare to the bit what one stage holds; within rounding what several do, whose uses one
    process adds otherwise.

    found: each rank's gradients, by name.  holders: how many stages hold a name.  are_summed:
    whether each of them has the sum already, and not its own summand.
    """
    for name, grad in expected.items():
        held = [grads[name] for grads in found if name in grads]
        assert len(held) == holders(name), name
        if len(held) == 1:
            assert torch.equal(held[0], grad), name
        elif are_summed:
            assert all(torch.equal(held[0], each) for each in held), name
            torch.testing.assert_close(held[0], grad)
        else:
            torch.testing.assert_close(sum(held[1:], held[0]), grad)
