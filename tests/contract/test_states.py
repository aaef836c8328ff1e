"""In packages with state machines, only one setter changes a state, and properties have no effects.

A debugger, a log line or `repr` may read a property at any time and on a single rank. A property
therefore never waits, reads a disk, runs an update or communicates.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "deepseek_zero"
FILES = [
    path
    for room in ("sharding", "optim", "tiers")
    for path in sorted((PACKAGE / room).glob("*.py"))
]
# Calls that wait, copy data, run updates or communicate.
VERBS = frozenset(
    "wait wait_for_copy wait_for_reduce wait_for_unshard wait_until_read wait_stream synchronize "
    "barrier barrier_begin barrier_end fetch load load_states load_values elements read read_now "
    "write evict store discard owned_view in_place_view before_read before_write flush "
    "flush_group finish undo conclude step step_now step_deferred step_speculative move gather "
    "unshard reshard reduce start_reduces reduce_late complete_sums all_gather all_gather_rows "
    "all_gather_text all_reduce exchange scatter broadcast agree open_comm Comm current_mesh "
    "refresh result sleep pread preadv pwrite pwritev open".split()
)
ALLOWED = {  # (class, property): reason
    ("TorchInterface", "state"): "torch's name, for users; what we call is load_states",
}
# Attribute: the only method that may set it after __init__. Private if only its class calls it.
SETTERS = {"_state": "enter", "_phase": "enter"}
CHUNK_STATE = ("disk.py", "state", "enter")  # the only state with a public attribute


def acting_properties(
    tree: ast.AST, allowed: frozenset[tuple[str, str]] = frozenset()
) -> Iterator[str]:
    """Yield the properties that call a verb directly or through other members of their class."""
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        own = {
            each.name: each
            for each in cls.body
            if isinstance(each, ast.FunctionDef) and not _is_setter(each)
        }
        for name, function in own.items():
            if _is_property(function) and (cls.name, name) not in allowed:
                yield from (
                    f"{cls.name}.{name} calls {verb}"
                    for verb in sorted(set(_verbs(function, own, {name})))
                )


def _decorators(function: ast.FunctionDef) -> list[str]:
    return [ast.unparse(each).rpartition(".")[2] for each in function.decorator_list]


def _is_setter(function: ast.FunctionDef) -> bool:
    return bool({"setter", "deleter"} & set(_decorators(function)))


def _is_property(function: ast.FunctionDef) -> bool:
    return bool({"property", "cached_property"} & set(_decorators(function)))


def _verbs(
    function: ast.FunctionDef, own: dict[str, ast.FunctionDef], seen: set[str]
) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            called = (
                ast.unparse(node.func).rpartition(".")[2]
                if isinstance(node.func, ast.Attribute)
                else ""
            )
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in VERBS:
                yield called
        of_self = (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        )
        if of_self and node.attr in own and node.attr not in seen:
            seen.add(node.attr)
            yield from _verbs(own[node.attr], own, seen)


def raw_assignments(tree: ast.AST, setters: dict[str, str]) -> Iterator[str]:
    """Yield the assignments that set a state without its setter."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else targets
            for target in (each for whole in targets for each in ast.walk(whole)):
                if not isinstance(target, ast.Attribute) or target.attr not in setters:
                    continue
                of_self = isinstance(target.value, ast.Name) and target.value.id == "self"
                setter = setters[target.attr]
                if not of_self or function.name not in ("__init__", setter, f"_{setter}"):
                    yield f"{function.name}: {ast.unparse(target)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_properties_have_no_side_effects(path: Path) -> None:
    assert not list(acting_properties(ast.parse(path.read_text()), frozenset(ALLOWED)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_state_is_set_by_its_setter(path: Path) -> None:
    file, attribute, setter = CHUNK_STATE
    setters = SETTERS | ({attribute: setter} if path.name == file else {})
    assert not list(raw_assignments(ast.parse(path.read_text()), setters))


def test_allowed_names_exist() -> None:
    found = {
        line.partition(" ")[0]
        for path in FILES
        for line in acting_properties(ast.parse(path.read_text()), frozenset())
    }
    assert found == {f"{cls}.{name}" for cls, name in ALLOWED}


def test_properties_that_act_are_found() -> None:
    """Properties that act through a method or through another property are found.

    `storage` is modeled on an old property of FlatBuffer, `state` on one of optimizers.
    """
    source = """
class FlatBuffer:
    @property
    def storage(self):
        return self.memory if self.extent is None else self.elements(0, 1)
class Optimizer:
    @property
    def state(self):
        return self._found()
    def _found(self):
        self.updater.flush()
    @property
    def first(self):
        return self.state[0]
    @property
    def fine(self):
        return self.inner
    @fine.setter
    def fine(self, value):
        self.flush()
class Session:
    @cached_property
    def comm(self):
        return Comm(self.device)
"""
    assert list(acting_properties(ast.parse(source))) == [
        "FlatBuffer.storage calls elements",
        "Optimizer.state calls flush",
        "Optimizer.first calls flush",
        "Session.comm calls Comm",
    ]


def test_raw_assignments_are_found() -> None:
    source = """
class Unit:
    def __init__(self):
        self._state = 0
    def _enter(self, state):
        self._state = state
    def reshard(self):
        self._state = 1
def elsewhere(unit, runtime):
    unit._state, other = 1, 2
    runtime._phase = 3
"""
    assert sorted(raw_assignments(ast.parse(source), SETTERS)) == [
        "elsewhere: runtime._phase",
        "elsewhere: unit._state",
        "reshard: self._state",
    ]
