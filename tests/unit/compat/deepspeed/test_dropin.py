"""The drop-in provides DeepSpeed's modules and names and does not change an installed DeepSpeed."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import deepseek_zero
from deepseek_zero.base.errors import NotBuiltError, UnknownNameError, UsageError
from deepseek_zero.compat.deepspeed import dropin
from deepseek_zero.compat.deepspeed.module_stub import VERSION, inventory
from deepseek_zero.compat.deepspeed.provided import PROVIDED

SOURCE = str(Path(deepseek_zero.__path__[0]).parent)
MOST_OF_TORCHS_IMPORT = 0.3  # measured: 0.18


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python process that finds only this package by default."""
    given = {name: value for name, value in os.environ.items() if name != dropin.SWITCH}
    given |= {"PYTHONPATH": SOURCE} | environment
    return subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, check=False
    )


def test_every_provided_name_is_the_object_of_its_module(as_deepspeed: None) -> None:
    seen = 0
    for module, rows in PROVIDED.items():
        stands_in = importlib.import_module(module)
        for home, names in rows.items():
            for name in names.split() if names != "*" else ():
                assert getattr(stands_in, name) is getattr(importlib.import_module(home), name), (
                    f"{module}.{name}"
                )
                seen += 1
    assert seen > 350


def test_every_module_and_name_of_deepspeeds_can_be_imported(as_deepspeed: None) -> None:
    seen = 0
    for module, entry in inventory().items():
        stands_in = importlib.import_module(module)
        names = {name for kind in ("class", "other") for name in entry.get(kind, "").split()}
        for name in {*names, *entry.get("values", {}), *dir(stands_in)}:
            getattr(stands_in, name)
            seen += 1
    assert len(inventory()) > 700 and seen > 9000


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m NAME` with the drop-in enabled."""
    given = os.environ | dropin.child_environment(
        {"PYTHONPATH": SOURCE, "PATH": os.environ["PATH"]}
    )
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "name",
    [
        "deepspeed.checkpoint.ds_to_universal",
        "deepspeed.utils.zero_to_fp32",
        "deepspeed.launcher.runner",
    ],
)
def test_modules_that_are_programs_run_by_name(name: str) -> None:
    done = run_module(name, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: deepspeed"), done.stderr


@pytest.mark.parametrize("name", ["deepspeed.env_report", "deepspeed.runtime.constants"])
def test_a_module_that_is_no_program_here_does_not_end_as_if_it_had_run(name: str) -> None:
    done = run_module(name)
    assert done.returncode != 0 and "deepseek_zero" in done.stderr


def test_version_equals_its_dunder_name(as_deepspeed: None) -> None:
    import deepspeed

    assert (
        deepspeed.version == deepspeed.__version__ == VERSION
        and deepspeed.git_hash == deepspeed.git_branch
    )


def test_an_unsupported_class_can_be_referenced_but_not_instantiated(as_deepspeed: None) -> None:
    from deepspeed import DeepSpeedHybridEngine as same
    from deepspeed import replace_transformer_layer
    from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine

    class Mine(DeepSpeedHybridEngine):
        pass

    assert (
        same is DeepSpeedHybridEngine
        and not isinstance(object(), same)
        and same.__module__ == "deepspeed.runtime.hybrid_engine"
    )
    for call in (same, Mine, replace_transformer_layer):
        with pytest.raises(
            NotBuiltError,
            match=r"deepspeed\..* is not provided .*\n.*eval\(\) and generate\(\) serve",
        ):
            call()


def test_constants_have_deepspeeds_values(as_deepspeed: None) -> None:
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT, ROUTE_TRAIN
    from deepspeed.runtime.lr_schedules import WARMUP_LOG_RATE

    assert (GRADIENT_CLIPPING_DEFAULT, ROUTE_TRAIN, WARMUP_LOG_RATE) == (1.0, "train", "log")


def test_a_function_with_the_name_of_its_module_remains_the_function(as_deepspeed: None) -> None:
    import deepspeed.utils.z3_leaf_module

    assert deepspeed.utils.z3_leaf_module is deepseek_zero.utils.z3_leaf_module


def test_the_chains_that_clients_follow_without_importing(as_deepspeed: None) -> None:
    import deepspeed

    assert "WarmupLR" in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
    assert (
        deepspeed.zero.Init
        is deepspeed.runtime.zero.partition_parameters.Init
        is deepseek_zero.zero.Init
    )
    assert (
        deepspeed.DeepSpeedEngine
        is deepspeed.runtime.engine.DeepSpeedEngine
        is deepseek_zero.DeepSpeedEngine
    )
    assert deepspeed.comm.get_rank() == 0
    assert deepspeed.accelerator.get_accelerator().device_count() >= 1
    with pytest.raises(AttributeError):
        deepspeed.__wrapped__  # noqa: B018


def test_an_unknown_name_raises_an_error_with_the_existing_names(as_deepspeed: None) -> None:
    import deepspeed

    with pytest.raises(
        NotBuiltError, match=r"deepspeed\.revert_transformer_layer is not provided .*\n.*stage 3"
    ):
        deepspeed.revert_transformer_layer(None)
    with pytest.raises(
        UnknownNameError, match=r"deepspeed\.initialise is not provided .*\n.*initialize,"
    ) as caught:
        _ = deepspeed.initialise
    assert isinstance(caught.value, AttributeError) and isinstance(
        caught.value, NotImplementedError
    )
    assert not hasattr(deepspeed, "initialise")
    with pytest.raises(ModuleNotFoundError):
        import deepspeed.runtime.no_such_module


def test_plain_pickle_reads_what_a_genuine_deepspeed_wrote(as_deepspeed: None) -> None:
    folder = Path(__file__).parents[3] / "data" / "deepspeed" / "stage3_fp16" / "global_step2"
    read = torch.load(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)[
        "optimizer_state_dict"
    ]
    assert type(read["loss_scaler"]).__module__ == "deepseek_zero.compat.deepspeed.loss_scaler"
    read["loss_scaler"].update_scale(False)  # the state of the scaler continues
    assert read["loss_scaler"].loss_scale >= 1 and read["zero_stage"] == 3


def test_metadata_and_module_agree_on_the_version(as_deepspeed: None) -> None:
    import deepspeed

    assert importlib.metadata.version("deepspeed") == deepspeed.__version__ == VERSION
    assert "not DeepSpeed" in importlib.metadata.metadata("deepspeed")["Summary"]


def test_it_is_enabled_and_disabled(as_deepspeed: None) -> None:
    assert dropin.is_dropin_active() and not dropin.is_dropin_imported()
    importlib.import_module("deepspeed.runtime.zero")
    assert dropin.is_dropin_imported()
    assert dropin.install_as_deepspeed() == dropin.DIRECTORY  # a second call changes nothing
    assert sys.path.count(str(dropin.DIRECTORY)) == 1
    assert os.environ["PYTHONPATH"].split(os.pathsep).count(str(dropin.DIRECTORY)) == 1
    dropin.uninstall_as_deepspeed()
    assert not dropin.is_dropin_active() and "deepspeed.runtime" not in sys.modules
    assert str(dropin.DIRECTORY) not in os.environ["PYTHONPATH"]


def test_an_imported_genuine_deepspeed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = ModuleType("deepspeed")
    genuine.__file__ = "/somewhere/deepspeed/__init__.py"
    monkeypatch.setitem(sys.modules, "deepspeed", genuine)
    with pytest.raises(UsageError, match=r"deepspeed is imported already, from /somewhere"):
        dropin.install_as_deepspeed()
    assert sys.modules["deepspeed"] is genuine and not dropin.is_dropin_active()


def test_a_client_that_is_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", ModuleType("accelerate"))
    with pytest.raises(UsageError, match=r"accelerate.* is imported already.*\n.*caches"):
        dropin.install_as_deepspeed()


def test_an_installed_genuine_is_shadowed_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("__version__ = '0.19.8'")
    code = "import deepspeed; print(deepspeed.__version__)"
    beside = os.pathsep.join([SOURCE, str(tmp_path)])
    assert python(code, PYTHONPATH=beside).stdout.strip() == "0.19.8"
    ours = python(
        f"import deepseek_zero; deepseek_zero.install_as_deepspeed(); {code}", PYTHONPATH=beside
    )
    assert ours.stdout.strip() == VERSION, ours.stderr


def test_the_line_for_pythons_start_waits_for_its_switch() -> None:
    line = Path(SOURCE, "deepseek_zero_dropin.pth").read_text(encoding="utf-8")
    assert (
        line.startswith("import ") and line.count("\n") == 1
    )  # the site module executes only lines that start with "import"
    code = (
        f"exec({line!r})\nimport "
        "importlib.util\nprint(importlib.util.find_spec('deepspeed').origin)"
    )
    assert str(dropin.DIRECTORY) in python(code, **{dropin.SWITCH: "1"}).stdout
    assert str(dropin.DIRECTORY) not in python(code).stdout


def test_the_import_adds_little_to_that_of_torch(tmp_path: Path) -> None:
    # accelerate imports the engine class in every call of unwrap_model. Importing pydantic takes
    # longer than importing all of this package.
    code = (
        # garbage collection would traverse the objects of torch at an arbitrary time
        "import gc, sys, time; gc.disable(); start = time.process_time(); import torch; middle = "
        "time.process_time(); from deepspeed import DeepSpeedEngine; end = time.process_time(); "
        "print((end - middle) / (middle - start), *{'pydantic', 'rich', 'torch._dynamo'} & "
        "sys.modules.keys())"
    )
    path = os.pathsep.join([str(dropin.DIRECTORY), SOURCE])
    # The first run writes the bytecode, as an installation does.
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    runs = [python(code, PYTHONPATH=path, **compiled).stdout.split() for _ in range(3)]
    assert min(float(ratio) for ratio, *_ in runs) < MOST_OF_TORCHS_IMPORT, runs
    assert not any(others for _, *others in runs)
