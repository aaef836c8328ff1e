"""Compare the gradients of pipeline stages with those of one process."""

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
    """Compare gradients: bitwise if one stage has the parameter, else within rounding errors.

    Several stages sum the gradients of a tied weight in another order than one process.

    found: each rank's gradients by name.

    holders: returns the number of stages that have a parameter.

    are_summed: whether each stage has the sum and not only its part.
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
