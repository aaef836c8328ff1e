"""The package `compat` is needed only for the drop-in: a copy without it trains."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "deepseek_zero"

TRAIN = """
import torch
import deepseek_zero
from deepseek_zero.base.world import rank, size

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

def batch(step):
    generator = torch.Generator().manual_seed(10 * step)
    whole = torch.randn(4, 4, generator=generator)
    return whole.chunk(size())[rank()]

zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
deepseek_zero.init_distributed()
engine, optimizer, _, _ = deepseek_zero.initialize(
    model=net(),
    config={
        "train_micro_batch_size_per_gpu": 4 // size(),
        "zero_optimization": zero,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    },
)
for step in range(3):
    engine.backward(engine(batch(step)).square().mean())
    engine.step()
by_engine = engine.module_state_dict()
engine.destroy()

model = deepseek_zero.DeepSeekZeRO3(net(), zero_optimization=zero)
optimizer = deepseek_zero.ZeroOptimizer(model.parameters(), lr=0.1, optimizer_type="sgd")
for step in range(3):
    model(batch(step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
by_model = model.state_dict()

plain = net()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
for step in range(3):
    whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step))
    optimizer.zero_grad()
    plain(whole).square().mean().backward()
    optimizer.step()
for name, value in plain.state_dict().items():
    torch.testing.assert_close(by_engine[name], value)
    torch.testing.assert_close(by_model[name], value)
import sys
assert not any(name.startswith("deepseek_zero.compat") for name in sys.modules)
print("trained", size())
"""

REST = """
import deepseek_zero, importlib, pkgutil, sys
for module in pkgutil.walk_packages(deepseek_zero.__path__, "deepseek_zero."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name == "llvmlite"  # an extra, which these files need
from deepseek_zero import *
from deepseek_zero.checkpoint.layouts import known_layouts
assert [layout.name for layout in known_layouts()] == ["slices", "safetensors", "torch"]
for name in ("DeepSpeedEngine", "install_as_deepspeed"):
    assert not hasattr(deepseek_zero, name)
assert not hasattr(deepseek_zero.comm, "all_reduce")
assert deepseek_zero.zero.Init and deepseek_zero.utils.safe_get_full_grad
print("imported")
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the package without `compat`."""
    folder = tmp_path_factory.mktemp("core")
    ignored = shutil.ignore_patterns("__pycache__", "compat")
    shutil.copytree(PACKAGE, folder / "deepseek_zero", ignore=ignored)
    return folder


def test_nothing_outside_compat_names_it() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if "compat" not in path.parts]
    assert len(files) > 200
    named = {str(path.relative_to(PACKAGE)): list(references(path.read_text())) for path in files}
    assert {name: found for name, found in named.items() if found} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import deepseek_zero.compat",
        "from deepseek_zero.compat.deepspeed import dropin",
        "from deepseek_zero import compat",
        "from ..compat.deepspeed import dropin",
        "from .. import compat",
        "def late():\n    from ..compat import plugin",
        "import_module('deepseek_zero.compat.deepspeed')",
        "import_module('..compat.deepspeed', __package__)",
        "import_module(f'{ROOT}.compat.deepspeed')",
    ],
)
def test_an_import_of_compat_is_noticed(line: str) -> None:
    assert list(references(line))
    assert not list(references('"""compatible with compat/deepspeed"""\nx = "compatible"'))


def references(text: str, packages: Sequence[str] = ("compat",)) -> Iterator[int]:
    """Yield the lines that import one of the packages or name it in a dotted string."""
    tree = ast.parse(text)
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and id(node) not in prose:
            text_of = node.value if isinstance(node.value, str) else ""
            names = [text_of] if "." in text_of else []
        if any(package in name.split(".") for name in names for package in packages):
            yield node.lineno


def test_a_copy_without_it_imports_and_trains(copy: Path) -> None:
    assert python(copy, "-c", REST) == "imported\n"
    assert python(copy, "-c", TRAIN) == "trained 1\n"


@pytest.mark.slow
def test_a_copy_without_it_trains_on_two_ranks(copy: Path) -> None:
    program = copy / "train.py"
    program.write_text(TRAIN)
    said = python(copy, "-m", "deepseek_zero", "run", "--nproc", "2", str(program))
    assert said.count("trained 2") == 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_at_least_80_percent_of_unit_and_rank_tests_pass_without_it(copy: Path) -> None:
    """A few tests import nothing of `compat` but read or write DeepSpeed's checkpoints."""
    folders = [ROOT / "tests" / "unit", ROOT / "tests" / "ranks"]
    files = [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    chosen = [path for path in files if not needs_compat(path.read_text())]
    pytest_of_copy = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    collect = [*pytest_of_copy, "--collect-only", *map(str, folders)]
    everything = python(PACKAGE.parent, *collect, cwd=ROOT, seconds=600)
    workers = ["-n", "2", "--dist", "loadscope"]
    arguments = [*pytest_of_copy, *workers, *map(str, chosen)]
    said = python(copy, *arguments, cwd=ROOT, seconds=3500, may_fail=True)
    passed = number_before("passed", said) + number_before("skipped", said)
    assert passed >= 0.8 * number_before("tests? collected|/", everything)


def needs_compat(text: str) -> bool:
    """Return whether a test imports `compat` or `deepspeed`."""
    return "as_deepspeed" in text or any(references(text, ("compat", "deepspeed")))


def number_before(word: str, said: str) -> int:
    """Return the number before a word in the last line of pytest's output."""
    return int(re.findall(rf"(\d+) ?(?:{word})", said.strip().splitlines()[-1])[0])


def python(
    copy: Path,
    *arguments: str,
    cwd: Path | None = None,
    seconds: int = 120,
    may_fail: bool = False,
) -> str:
    """Run Python with the copy of the package and return its standard output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd or copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert may_fail or done.returncode == 0, done.stdout + done.stderr
    return done.stdout
