"""The command line of `run`: its own options and the arguments of the script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import deepseek_zero
import deepseek_zero.cli as cli
from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.base.launch import MESH
from deepseek_zero.cli import run as run_module
from deepseek_zero.cli.launcher_options import pid_file, refuse_launcher
from deepseek_zero.cli.nodes import NodeMachine, NodePlan, NodeShare
from deepseek_zero.cli.ranks import Outcome, Target
from deepseek_zero.cli.run import RunOptions, rank_environment, run
from deepseek_zero.compat.deepspeed.commands import exec_command
from deepseek_zero.compat.deepspeed.dropin import DIRECTORY, PROGRAMS

PARSED: list[RunOptions] = []
REFUSED = [each.name for each in fields(RunOptions) if "refused" in each.metadata]


def parse(*line: str) -> RunOptions:
    """Return the options that `deepseek-zero run` parses from `line`."""
    app = cli.typer.Typer()
    app.command("run", context_settings=cli.RUN_CONTEXT)(
        cli._run_command(lambda one: PARSED.append(one) or 0)
    )
    result = CliRunner().invoke(app, list(line))
    assert result.exit_code == 0, result.output
    return PARSED.pop()


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_options_of_deepspeed_are_refused_by_name(name: str) -> None:
    with pytest.raises(NotBuiltError, match=rf"--{name} of the deepspeed command is not supported"):
        run(RunOptions(command=[__file__], **{name: 1}))


def test_deepspeeds_other_options_are_accepted(tmp_path: Path) -> None:
    line = (
        "--no_ssh --no_ssh_check --launcher pdsh --enable_each_rank_log logs --save_pid -q x.py -q"
    )
    options = parse(*line.split())
    assert (options.log_dir, options.command, options.quiet) == (Path("logs"), ["x.py", "-q"], True)
    refuse_launcher(options, 1)
    with pytest.raises(NotBuiltError, match="--launcher pdsh cannot start 2 machines"):
        refuse_launcher(options, 2)
    with pytest.raises(NotBuiltError, match="--log_level loud"):
        run(RunOptions(command=[__file__], log_level="loud"))
    kept = Path(tempfile.gettempdir()) / f"{os.getpid()}.deepspeed"
    with pid_file(options):
        assert kept.read_text() == str(os.getpid())
        assert kept.stat().st_mode & 0o777 == 0o600
    assert not kept.exists()


def test_save_pid_replaces_an_old_file_but_follows_no_link_and_keeps_files_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept, precious, me = tmp_path / f"{os.getpid()}.deepspeed", tmp_path / "precious", os.geteuid()
    precious.write_text("mine")
    kept.symlink_to(precious)
    options = RunOptions(command=[__file__], save_pid=True)
    for _ in range(2):
        with pid_file(options):
            assert (kept.is_symlink(), kept.read_text()) == (False, str(os.getpid()))
        kept.write_text("of a process that had this number")
    kept.unlink()
    kept.symlink_to(precious)
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with (
        pytest.raises(UsageError, match=r"(?s)--save_pid cannot write .*File exists"),
        pid_file(options),
    ):
        pass
    assert kept.is_symlink() and precious.read_text() == "mine"


def test_every_option_of_deepspeeds_command_is_accepted() -> None:
    theirs = (
        "hostfile include exclude num_nodes num_gpus num_accelerators master_port master_addr "
        "node_rank launcher launcher_args module no_python no_local_rank no_ssh no_ssh_check "
        "force_multi save_pid enable_each_rank_log autotuning bind_cores_to_rank bind_core_list "
        "ssh_port venv_script log_level quiet"
    )
    shown = (
        CliRunner()
        .invoke(cli.app, ["run", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
        .output
    )
    assert [name for name in theirs.split() if f"--{name.replace('_', '-')}" not in shown] == []


SCRIPT_WORDS = ["--run", "x", "--nproc", "9", "-m", "--help", "--", "--master_port=1", "-", ""]


def test_everything_after_the_script_is_the_scripts() -> None:
    options = parse("--nproc", "2", "train.py", *SCRIPT_WORDS)
    assert (options.nproc, options.command) == (2, ["train.py", *SCRIPT_WORDS])
    assert (options.module, options.master_port) == (False, 0)


@pytest.mark.parametrize(
    "spelling", ["--num_gpus", "--num-gpus", "--num_accelerators", "--num-accelerators"]
)
def test_both_spellings_and_both_names_are_accepted(spelling: str) -> None:
    assert parse(spelling, "3", "train.py").num_gpus == 3


def test_the_normalised_spelling_does_not_change_values() -> None:
    options = parse(
        "-H",
        "my_hosts",
        "--include=node_1:0",
        "--master_addr",
        "node_1",
        "my_script.py",
        "--my_flag=a_b",
    )
    assert (options.hostfile, options.include, options.master_addr) == (
        Path("my_hosts"),
        "node_1:0",
        "node_1",
    )
    assert options.command == ["my_script.py", "--my_flag=a_b"]


def test_deepspeeds_launch_line_is_understood() -> None:
    line = "--num_gpus=8 your_train_script.py --deepspeed --deepspeed_config deepspeed_config.json"
    options = parse(*line.split())
    assert options.num_gpus == 8
    assert options.command == [
        "your_train_script.py",
        "--deepspeed",
        "--deepspeed_config",
        "deepspeed_config.json",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RunOptions(), "No script was given"),
        (RunOptions(command=[__file__], max_restarts=-1), "--max-restarts is -1"),
        (RunOptions(command=[__file__], save_grace=float("nan")), "--save-grace is nan"),
        (RunOptions(command=["absent.py"]), "There is no script 'absent.py'"),
        (RunOptions(command=[os.path.dirname(__file__)]), "no script '.*__main__.py'"),
        (RunOptions(command=["python", "train.py"]), "starts Python itself"),
        (RunOptions(command=["no-such-program-here"], no_python=True), "There is no program"),
        (RunOptions(command=["x"], module=True, no_python=True), "mutually exclusive"),
        (RunOptions(command=[__file__], tp=0), "--tp is 0"),
        (
            RunOptions(command=[__file__], tp=2, pp=2, nproc=6),
            "--pp 2 --tp 2 needs a multiple of 4 processes, and 6",
        ),
    ],
)
def test_a_command_that_cannot_start_is_refused_before_anything_starts(
    options: RunOptions, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run(options)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (RunOptions(command=[__file__]), Target.SCRIPT),
        (RunOptions(command=["package.train"], module=True), Target.MODULE),
        (RunOptions(command=["true"], no_python=True), Target.PROGRAM),
    ],
)
def test_the_kind_of_target_follows_the_options(options: RunOptions, kind: Target) -> None:
    assert run_module._command(options).kind is kind


def test_local_rank_is_passed_first_and_only_if_it_is_set(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("parser.add_argument('--local_rank')\n")
    passed = run_module._command(RunOptions(command=[str(script), "--epochs", "2"]))
    assert passed.argv(1)[-4:] == [str(script), "--local_rank=1", "--epochs", "2"]
    kept = run_module._command(
        RunOptions(command=[str(script), "--epochs", "2"], no_local_rank=True)
    )
    assert kept.argv(1)[-3:] == [str(script), "--epochs", "2"]


@pytest.mark.parametrize(
    ("line", "cores", "nproc", "mesh"),
    [
        ("train.py", 2, 1, None),
        ("--tp 2 --pp 2 train.py", 2, 4, "pp=2,tp=2"),
        ("--tp 2 train.py", 10, 4, "tp=2"),
        ("--sp 2 --nproc 4 train.py", 2, 4, "sp=2"),
    ],
)
def test_axes_are_reported_to_ranks_with_whole_copies(
    line: str,
    cores: int,
    nproc: int,
    mesh: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    started: list[Any] = []
    monkeypatch.setattr(run_module, "allowed_cores", lambda: cores)
    agent = SimpleNamespace(
        gpus_of_this_machine=lambda environment: (),
        run_ranks=lambda *given: started.append(given) or Outcome(0),
    )
    monkeypatch.setitem(sys.modules, "deepseek_zero.cli.agent", agent)
    assert run(parse(*line.split())) == 0
    plan, _, environment, *_ = started[0]
    assert (plan.share.nproc, environment.get(MESH)) == (nproc, mesh)


def test_chosen_gpus_are_made_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = rank_environment(
        NodePlan(NodeShare(2, ("5", "7"))), NodeMachine(8, ("2", "5", "7"))
    )
    assert environment["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert environment["OMP_NUM_THREADS"] == "4"
    assert "CUDA_VISIBLE_DEVICES" not in rank_environment(
        NodePlan(NodeShare(3)), NodeMachine(8, ("2", "5", "7"))
    )


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, deepseek_zero.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_exec_becomes_the_command_with_the_dropin_first(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[object] = []
    monkeypatch.setattr(os, "execve", lambda *what: became.extend(what))
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    assert CliRunner().invoke(cli.app, ["exec", "python", "-m", "x", "--nproc", "2"]).exit_code == 0
    program, line, environment = became
    assert Path(str(program)).is_file() and line == ["python", "-m", "x", "--nproc", "2"]
    assert isinstance(environment, dict)
    assert environment["PYTHONPATH"] == f"{DIRECTORY}{os.pathsep}/theirs"
    assert environment["PATH"].split(os.pathsep)[0] == str(PROGRAMS)
    for name in ("deepspeed", "deepspeed.pt", "ds", "ds_report", "dsr"):
        assert shutil.which(name, path=environment["PATH"]) == str(PROGRAMS / name)


def test_exec_refuses_a_missing_program() -> None:
    with pytest.raises(UsageError, match=r"no program 'no-such-program-here'"):
        exec_command(["no-such-program-here"])
    with pytest.raises(UsageError, match=r"no program 'train.py'.*\n.*exec python train.py"):
        exec_command(["train.py"])
    with pytest.raises(UsageError, match="No command was given"):
        exec_command([])


def test_dropin_path_prints_only_the_directory() -> None:
    assert CliRunner().invoke(cli.app, ["dropin-path"]).output == f"{DIRECTORY}\n"
    assert (DIRECTORY / "deepspeed" / "__init__.py").is_file()


def test_a_library_error_ends_with_its_message_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["deepseek-zero", "run", "absent.py"])
    with pytest.raises(SystemExit) as ended:
        cli.answer()
    assert ended.value.code == 2
    assert "There is no script 'absent.py'" in capsys.readouterr().err


def test_version_prints_the_details_for_a_bug_report() -> None:
    result = CliRunner().invoke(cli.app, ["version"])
    assert result.exit_code == 0
    assert all(word in result.output for word in ("deepseek-zero", "torch", "Python"))


def test_the_version_is_an_option_and_the_package_a_program() -> None:
    told = [
        subprocess.run(
            [sys.executable, "-m", "deepseek_zero", word],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for word in ("version", "--version")
    ]
    assert told[0] == told[1]
    assert told[0].startswith(
        f"deepseek-zero {deepseek_zero.__version__}, torch {torch.__version__.partition('+')[0]}"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["ch"], "checkpoint"), (["checkpoint", "ver"], "verify"), (["run", "--npr"], "--nproc")],
)
def test_a_shell_completes_commands_and_options(words: list[str], expected: str) -> None:
    variables = {
        "_DEEPSEEK_ZERO_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["deepseek-zero", *words]),
        "COMP_CWORD": str(len(words)),
    }
    result = CliRunner().invoke(cli.app, [], env=variables)
    assert result.output.split() == [expected]


def test_options_about_cores_and_other_machines_have_no_effect_on_one_machine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = "--bind_cores_to_rank --bind_core_list 0-1 --ssh_port 2222 --force_multi --venv_script x"
    options = parse(*line.split(), "--num_gpus", "1", "--no_python", "true")
    assert run(options) == 0
    assert "--bind_cores_to_rank has no effect" in caplog.text
    with pytest.raises(NotBuiltError, match="--ssh_port 2222 cannot start 2 machines"):
        refuse_launcher(options, 2)


def test_the_deepspeed_command_accepts_its_defaults() -> None:
    line = "--num_gpus -1 --num_nodes -1 --node_rank -1 --no_python true"
    assert run(parse("--as-deepspeed", *line.split())) == 0
    with pytest.raises(UsageError, match="--num_gpus is -1"):
        run(parse(*line.split()))
