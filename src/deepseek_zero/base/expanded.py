"""Tensors in which several indices refer to the same element of memory."""

from __future__ import annotations

from torch import Tensor


def copy_into(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor that `expand` may have made.

    Torch itself refuses to write into an expanded tensor.

    Args:
        tensor: A strided tensor, which is changed in place.
        values: The values, in the same shape. Of repetitions, the first is used.
    """
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
            values = values.narrow(dim, 0, 1)
    tensor.copy_(values)
