"""The library logs to stderr by default, and a program's logging configuration takes precedence."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

ENGINE = "deepseek_zero.initialize(model=torch.nn.Linear(2, 2), config={'train_batch_size': 1})"
ENGINE_OF_ERRORS = ENGINE.replace("1}", "1, 'log_level': 'error'}")
DEEPSPEED = (
    "from deepseek_zero.compat.deepspeed import dropin; dropin.install_as_deepspeed(); import "
    "deepspeed"
)
QUIET = "logging.getLogger('deepseek_zero')"
# Maps each program to the library's lines that it prints on stderr.
PROGRAMS = {
    "imports everything and looks": (
        f"""
        import deepseek_zero.zero, deepseek_zero.utils, deepseek_zero.comm
        import deepseek_zero.api.initialize, deepseek_zero.compat.deepspeed.dialect
        assert not {QUIET}.handlers and {QUIET}.propagate and {QUIET}.level == logging.NOTSET
        assert not logging.getLogger().handlers
        """,
        [],
    ),
    "makes an engine": (ENGINE, ["[deepseek_zero] INFO: no launcher"]),
    "makes two engines": (f"{ENGINE}; {ENGINE}", ["[deepseek_zero] INFO: no launcher"]),
    "configures logging first": (
        f"logging.basicConfig(level='INFO', format='MINE %(message)s'); {ENGINE}",
        ["MINE no launcher"],
    ),
    "configures logging and wants warnings only": (
        f"logging.basicConfig(format='MINE %(message)s'); {ENGINE}; {QUIET}.warning('a warning')",
        ["MINE a warning"],
    ),
    "gives our logger a handler": (
        f"{QUIET}.addHandler(logging.StreamHandler()); {QUIET}.setLevel('INFO'); {ENGINE}",
        ["no launcher"],
    ),
    "asks our logger for warnings only": (f"{QUIET}.setLevel('WARNING'); {ENGINE}", []),
    "imports deepspeed, whose log starts at warnings": (
        f"{DEEPSPEED}; {ENGINE}; deepspeed.utils.logger.warning('a warning')",
        ["[deepseek_zero] WARNING: a warning"],
    ),
    "imports deepspeed and configures logging": (
        f"logging.basicConfig(level='INFO'); {DEEPSPEED}; {ENGINE}",
        [],
    ),
    "imports deepspeed and names the level in the configuration": (
        f"{DEEPSPEED}; {ENGINE_OF_ERRORS}; deepspeed.utils.logger.warning('a warning')",
        [],
    ),
    "logs by log_dist before there is an engine": (
        "deepseek_zero.log_dist('hello')",
        ["[deepseek_zero] INFO: hello"],
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_reads_the_requested_values(program: str) -> None:
    source, expected = PROGRAMS[program]
    done = subprocess.run(
        [sys.executable, "-c", "import logging, torch, deepseek_zero\n" + textwrap.dedent(source)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [
        line[: len(wanted)] for line, wanted in zip(lines, expected, strict=True)
    ] == expected, done.stderr


@pytest.mark.parametrize(
    "program", [[sys.executable, "-m", "deepseek_zero.cli", "version"], [sys.executable, "-c"]]
)
def test_a_level_that_does_not_exist_is_refused_with_advice(program: list[str]) -> None:
    source = [f"import torch, deepseek_zero; {ENGINE}"] if program[-1] == "-c" else []
    done = _run_with_level([*program, *source], "verbose")
    assert "DEEPSEEK_ZERO_LOG_LEVEL='verbose' is not a level of the log." in done.stderr
    assert "set it to one of debug, info, warning, error, critical" in done.stderr
    if not source:
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_an_empty_variable_sets_no_level() -> None:
    done = _run_with_level([sys.executable, "-m", "deepseek_zero.cli", "version"], "")
    assert done.returncode == 0, done.stderr


def _run_with_level(command: list[str], level: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "DEEPSEEK_ZERO_LOG_LEVEL": level,
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
