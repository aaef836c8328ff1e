"""Test the commands of DeepSpeed's multi-node runners."""

from __future__ import annotations

import pytest

from deepseek_zero.compat.deepspeed import (
    multinode_runner,
)


def test_commands_for_several_machines_name_the_program_and_the_hosts() -> None:
    hosts = {"a": 2, "b": 2}
    args = multinode_runner.parse_args(
        ["--launcher_args", "-mca btl_tcp_if_include eth1", "train.py", "--lr", "1"]
    )
    info = multinode_runner.encode_world_info(hosts)
    command = multinode_runner.OpenMPIRunner(args, info, hosts).get_cmd({}, hosts)
    assert (
        command[:3] == ["mpirun", "-n", "4"]
        and "eth0" not in command
        and command[-3:] == ["train.py", "--lr", "1"]
    )
    pdsh, _, environment = multinode_runner.PDSHRunner(args, info).get_cmd({}, hosts)
    assert "a,b" in pdsh and environment["PDSH_RCMD_TYPE"] == "ssh"
    slots = {"a": [0, 1], "b": [0, 1]}
    assert multinode_runner.parse_resource_filter(slots, exclude_str="a:0") == {
        "a": [1],
        "b": [0, 1],
    }
    with pytest.raises(ValueError, match="not found"):
        multinode_runner.parse_resource_filter(slots, include_str="c")


def test_pdsh_gets_the_flags_and_quoted_arguments_of_the_program() -> None:
    words = ["--module", "--no_local_rank", "package.train", "--text", "a b; c", "--lr=1"]
    args = multinode_runner.parse_args(words)
    command, *_ = multinode_runner.PDSHRunner(args, "").get_cmd({}, {"a": 2})
    assert command[-6:] == [
        "--module",
        "--no_local_rank",
        "package.train",
        "--text",
        "'a b; c'",
        "--lr=1",
    ]


def test_pdsh_starts_the_selected_slots() -> None:
    runner = multinode_runner.PDSHRunner(multinode_runner.parse_args(["train.py"]), "")
    for hosts in ({"a": 2, "b": 2}, {"a": [0, 1], "b": [0, 1]}):
        assert "--num_gpus=2" in runner.get_cmd({}, hosts)[0]
    for hosts in ({"a": 2, "b": 1}, {"a": [1], "b": [1]}, {}):
        with pytest.raises(ValueError, match="selected slots"):
            runner.get_cmd({}, hosts)


def test_the_log_folder_is_no_program() -> None:
    assert multinode_runner.parse_args(["-q", "train.py"]).quiet
    args = multinode_runner.parse_args(["--enable_each_rank_log", "logs", "train.py"])
    assert (args.enable_each_rank_log, args.user_script) == ("logs", "train.py")
    assert multinode_runner.parse_args(["train.py"]).enable_each_rank_log == "None"
