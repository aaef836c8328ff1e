"""The private names of torch on which this library depends still exist and work as expected."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepseek_zero.base import device as device_module
from deepseek_zero.base.device import (
    ScalesItself,
    allocated_bytes,
    backward_id,
    call_instead,
    call_plainly,
    clear_hooks,
    default_device,
    ends_recomputation,
    fake_tensors,
    has_fast_bf16,
    has_gradient_hooks,
    held_by,
    in_torch_func,
    is_persistent_buffer,
    mark_stepped,
    next_node_number,
    number_of_node,
    outer_saved_tensor_hooks,
    outside_torch_func,
    queue_backward_callback,
    run_last,
    storage_users,
    version_of,
    without_torch_function,
)
from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.memory import private_pages
from deepseek_zero.base.world import local_rank

PRIVATE = (
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch._C._current_graph_task_id",
    "torch._subclasses.FakeTensorMode",
    "torch._subclasses.FakeTensor",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._storage_Use_Count",
    "torch._C.DisableTorchFunctionSubclass",
    "torch.optim.Optimizer._patch_step_function",
    "torch.utils.checkpoint._StopRecomputationError",
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "torch._C._SetExcludeDispatchKeyGuard",
    "torch._C.DispatchKey.ADInplaceOrView",
    "torch.utils._python_dispatch",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._functorch.get_interpreter_stack",
    "torch._C._functorch.TransformType.Grad",
    "torch._C._functorch.TransformType.Jvp",
    "torch._functorch.pyfunctorch",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "torch._C._will_engine_execute_node",
    "torch.autograd.graph._get_grad_fn_or_grad_acc",
    "torch._fused_adam_",
    "torch._fused_adamw_",
    "torch._fused_sgd_",
    "torch._fused_adagrad_",
    "torch._foreach_norm",
    "torch._guards.TracingContext.try_get",
)


@pytest.mark.parametrize("name", PRIVATE)
def test_torch_still_has_each_private_name(name: str) -> None:
    found: object = torch
    for part in name.split(".")[1:]:
        assert hasattr(found, part), f"torch moved {name}: base/device.py needs another way"
        found = getattr(found, part)


def test_a_transform_of_torch_func_is_detected_and_exited() -> None:
    seen = []

    def square(value: torch.Tensor) -> torch.Tensor:
        seen.append(in_torch_func())
        with outside_torch_func():
            seen.append(in_torch_func())
            # Inside the transform, a tensor would have no data pointer.
            assert torch.zeros(1).add(1).data_ptr()
        return value.square().sum()

    torch.func.grad(square)(torch.ones(2))
    torch.func.vmap(square)(torch.ones(3, 2))
    torch.func.vmap(torch.func.grad(square))(torch.ones(3, 2))
    assert seen == [True, False, False, False, True, False] and not in_torch_func()


OF_OBJECTS: dict[str, object] = {
    "_sequence_nr": torch.ones(1, requires_grad=True).view(1).grad_fn,
    "_version": torch.ones(1),
    "_backward_hooks": torch.ones(1),
    "_post_accumulate_grad_hooks": torch.ones(1),
    "_parameters": nn.Module(),
    "_compiled_call_impl": nn.Module(),
    "_call_impl": nn.Module(),
    "_modules": nn.Module(),
    "_non_persistent_buffers_set": nn.Module(),
    "_cdata": torch.ones(1).untyped_storage(),
    "_schema": torch.ops.aten.mm.default,
    "_scaled_dot_product_flash_attention_for_cpu": torch.ops.aten,
    "_forward_hooks": nn.Linear(1, 1),
    "_forward_pre_hooks": nn.Linear(1, 1),
    "_backward_pre_hooks": nn.Linear(1, 1),
    "_rendezvous_handlers": import_module("torch.distributed.rendezvous"),
    "_getframe": sys,
    "_optimizer_step_pre_hooks": torch.optim.SGD([torch.ones(1)]),
    "_optimizer_step_post_hooks": torch.optim.SGD([torch.ones(1)]),
    "_optimizer_state_dict_pre_hooks": torch.optim.SGD([torch.ones(1)]),
    "_optimizer_state_dict_post_hooks": torch.optim.SGD([torch.ones(1)]),
    "_optimizer_load_state_dict_pre_hooks": torch.optim.SGD([torch.ones(1)]),
    "_optimizer_load_state_dict_post_hooks": torch.optim.SGD([torch.ones(1)]),
}


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_torchs_objects_still_have_each_private_name(name: str) -> None:
    assert hasattr(OF_OBJECTS[name], name), f"torch moved {name}: base/device.py needs another way"


def test_torchs_schedules_check_whether_the_optimizer_was_called() -> None:
    optimizer = torch.optim.SGD([torch.ones(1)])
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    mark_stepped(optimizer)
    # Torch warns if it considers the optimizer not called; warnings are errors in these tests.
    schedule.step()


def test_these_are_all_the_private_names_of_torch_in_the_module() -> None:
    source = Path(device_module.__file__).read_text()
    used = {
        match
        for match in re.findall(r"torch(?:\.\w+)+", source)
        if re.search(r"\._[a-zA-Z]", match)
    }
    assert used == set(PRIVATE), "each private name is tested here"
    attributes = re.sub(r"torch(?:\.\w+)+", "", source)
    of_objects = {
        *re.findall(r"\.(_[a-z]\w*)", attributes),
        *re.findall(r'"(_[a-z]\w*)"', attributes),
    }
    assert of_objects == {*OF_OBJECTS, "_opt_called"}, "each private name is tested here"


def test_a_modules_call_can_be_replaced_and_still_call_the_module() -> None:
    module = nn.Linear(1, 1, bias=False)
    seen: list[Any] = []
    module.register_forward_hook(lambda *given: seen.append(given))
    call_instead(module, lambda *args: ("instead", *args))
    assert module(1) == ("instead", 1) and not seen
    assert call_plainly(module, torch.ones(1)).shape == (1,) and len(seen) == 1


def test_torchs_grad_scaler_checks_first_whether_the_optimizer_scales() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    with pytest.raises(UsageError, match="GradScaler"):
        scaler.step(type("Ours", (ScalesItself, torch.optim.SGD), {})([torch.ones(1)]))


def test_a_tensors_version_rises_with_each_in_place_operation() -> None:
    tensor = torch.ones(2)
    before = version_of(tensor)
    tensor.add_(1)
    assert version_of(tensor) == before + 1


def test_hooks_on_a_gradient_are_detected_until_they_are_removed() -> None:
    tensor = torch.ones(2, requires_grad=True)
    handle = tensor.register_hook(torch.clone)
    assert has_gradient_hooks(tensor)
    handle.remove()
    assert not has_gradient_hooks(tensor)


def test_hooks_of_one_class_run_after_all_others() -> None:
    class Last:
        def __call__(self, param: torch.Tensor) -> None:
            order.append("last")

    order: list[str] = []
    param = nn.Parameter(torch.ones(1))
    param.register_post_accumulate_grad_hook(Last())
    param.register_post_accumulate_grad_hook(lambda _: order.append("first"))
    run_last(param, Last)
    param.sum().backward()
    assert order == ["first", "last"]


def test_a_module_whose_hooks_are_cleared_calls_none() -> None:
    module = nn.Linear(2, 2)
    calls = list[str]()
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    module.register_forward_hook(lambda *_: calls.append("after"))
    module.register_full_backward_pre_hook(lambda *_: calls.append("before backward"))
    module.register_full_backward_hook(lambda *_: calls.append("after backward"))
    clear_hooks(module)
    module(torch.ones(1, 2)).sum().backward()
    assert calls == []


def test_fake_tensors_have_shapes_and_no_values() -> None:
    with fake_tensors() as fakes:
        fake = fakes.from_tensor(torch.ones(2, 3))
        product = fake @ torch.ones(3, 5)
    assert product.shape == (2, 5)
    assert type(product) is not torch.Tensor
    view = torch.ones(2, 3)
    # The pipeline (chain.py) compares storages by identity.
    assert view.t().untyped_storage() is view.untyped_storage()


def test_a_module_lists_its_parameters_and_persistent_buffers() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    module.register_parameter("own", nn.Parameter(torch.ones(1)))
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("lost", torch.ones(1), persistent=False)
    assert list(map(id, held_by(module))) == [id(module.own), id(module[0])]
    assert is_persistent_buffer(module, "kept")
    assert not is_persistent_buffer(module, "lost")


def test_a_queued_callback_runs_once_after_every_gradient_of_the_backward_has_been_computed() -> (
    None
):
    first, last = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    seen: list[tuple[bool, bool]] = []

    def at_the_end() -> None:
        seen.append((first.grad is not None, last.grad is not None))

    def queue(grad: torch.Tensor) -> None:
        queue_backward_callback(at_the_end)

    output = (first * 2 + last).exp()
    output.register_hook(queue)
    output.sum().backward()
    assert seen == [(True, True)]


def test_queueing_outside_a_backward_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        queue_backward_callback(lambda: None)


def test_backward_id_differs_between_backward_calls_and_is_minus_1_outside() -> None:
    value, seen = torch.ones(2, requires_grad=True), []
    for _ in range(2):
        output = value * 2
        output.register_hook(lambda grad: seen.append(backward_id()))
        output.sum().backward()
    assert backward_id() == -1
    assert len(set(seen)) == 2 and min(seen) >= 0


def test_the_inner_backward_of_a_reentrant_checkpoint_has_an_id_of_its_own() -> None:
    inside: list[int] = []
    outside: list[int] = []

    def segment(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        if y.requires_grad:
            y.register_hook(lambda grad: inside.append(backward_id()))
        return y

    output = checkpoint(segment, torch.ones(2, requires_grad=True), use_reentrant=True)
    output.register_hook(lambda grad: outside.append(backward_id()))
    output.sum().backward()
    assert inside and outside and inside[0] != outside[0]


def test_the_saved_tensor_hooks_in_force_are_found_and_work() -> None:
    assert outer_saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: ("packed", tensor), lambda packed: packed[1] + 1
    ):
        found = outer_saved_tensor_hooks()
    assert found is not None
    pack, unpack = found
    assert pack(torch.zeros(()))[0] == "packed"
    assert unpack(("packed", torch.zeros(()))) == 1
    assert outer_saved_tensor_hooks() is None


def test_the_end_of_a_recomputation_is_distinguished_from_an_error() -> None:
    ends: list[bool] = []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return super().forward(x)
            except Exception as error:
                ends.append(ends_recomputation(error))
                raise

    checkpoint(
        Watched(3, 3), torch.randn(2, 3, requires_grad=True), use_reentrant=False
    ).sum().backward()
    assert ends == [True] and not ends_recomputation(RuntimeError())


def test_storage_users_counts_tensors_and_views_and_what_autograd_saved() -> None:
    tensor = torch.zeros(4)
    assert storage_users(tensor) == 1
    view = tensor[1:]
    assert (storage_users(tensor), storage_users(view)) == (2, 2)
    del view
    assert storage_users(tensor) == 1
    weight = tensor.view(2, 2)
    output = torch.ones(1, 2, requires_grad=True) @ weight
    del weight
    assert storage_users(tensor) == 2, "autograd holds the view that it saved"
    output.sum().backward()
    assert storage_users(tensor) == 1


class _Loud(nn.Parameter):
    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        raise AssertionError("consulted")


def test_without_torch_function_a_subclass_is_not_consulted() -> None:
    loud = torch.zeros(2).as_subclass(_Loud)
    with pytest.raises(AssertionError, match="consulted"):
        loud.sum()
    with without_torch_function():
        assert float(loud.sum()) == 0.0


def test_the_devices_numbers_are_sane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_rank() == 3
    monkeypatch.delenv("LOCAL_RANK")
    assert local_rank() == 0
    assert default_device().type in ("cpu", "cuda")
    assert isinstance(has_fast_bf16(torch.device("cpu")), bool)


def test_the_resident_set_grows_with_memory_that_is_touched() -> None:
    before = allocated_bytes(torch.device("cpu"))
    # The C library may have kept freed pages for reuse.
    held = private_pages(16 << 20, torch.float32).fill_(1.0)
    assert allocated_bytes(torch.device("cpu")) - before > 0.9 * held.nbytes


def test_a_backward_counts_the_leaves_it_reaches() -> None:
    used, idle, fixed = (torch.ones(2, requires_grad=each) for each in (True, True, False))
    counts: list[int] = []
    used.register_hook(lambda grad: counts.append(device_module.count_reached([used, idle, fixed])))
    (used * fixed).sum().backward()
    assert counts == [1]


def test_nodes_are_numbered_as_they_are_recorded() -> None:
    leaf = torch.ones(2, requires_grad=True)
    begin = next_node_number()
    first, second = leaf * 2, _Double.apply(leaf)
    end = next_node_number()
    assert begin <= number_of_node(first.grad_fn) < number_of_node(second.grad_fn) < end
    (accumulates, _), *_ = first.grad_fn.next_functions
    assert accumulates.variable is leaf


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2
