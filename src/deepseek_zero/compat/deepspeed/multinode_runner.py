"""DeepSpeed's `deepspeed.launcher.multinode_runner` and its `runner` functions.

`deepseek-zero run` launches processes itself, on every host. These classes only return commands,
for programs that build their own command for pdsh, MPI or Slurm.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from ...base.errors import UsageError
from ...cli.hostfile import parse_hostfile, selected_slots

Resources = Mapping[str, Any]  # host -> its slots or their number

PDSH_MAX_FAN_OUT = 1024


def encode_world_info(world_info: Resources) -> str:
    """Return hosts and their slots, encoded as URL-safe base64 of JSON."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode("utf-8")).decode("utf-8")


def _parse_hostfile(hostfile_lines: Iterable[str]) -> dict[str, int]:
    """Return the number of slots of each host.

    Raises:
        ValueError: The hostfile is empty, has a duplicate host, or cannot be parsed.
    """
    try:
        return {host: len(slots) for host, slots in parse_hostfile(hostfile_lines).items()}
    except UsageError as error:
        raise ValueError(str(error)) from error


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Return the number of slots of each host in a hostfile; None if there is no file."""
    if not os.path.isfile(hostfile_path):
        return None
    with open(hostfile_path, encoding="utf-8") as file:
        return _parse_hostfile(file.readlines())


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Return the hosts and slots that --include or --exclude select.

    Args:
        host_info: For each available host, its slots (GPU indices).
        include_str: Value of --include.
        exclude_str: Value of --exclude.

    Returns:
        The selected slots of each host. Hosts without a selected slot are missing.

    Raises:
        ValueError: Both are given, one cannot be parsed, or a host or slot does not exist.
    """
    hosts = {host: tuple(slots) for host, slots in host_info.items()}
    try:
        found = selected_slots(hosts, include_str, exclude_str)
    except UsageError as error:
        raise ValueError(str(error)) from error
    return {host: list(slots) for host, slots in found.items()}


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> dict[str, list[int]]:
    """Return the hosts and slots that two options select, from numbers of slots.

    Args:
        resource_pool: Number of slots of each host.
        inclusion: Value of --include.
        exclusion: Value of --exclude.

    Returns:
        The selected slots of each host. Hosts without a selected slot are missing.
    """
    return parse_resource_filter(
        {host: list(range(n)) for host, n in resource_pool.items()}, inclusion, exclusion
    )


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed options of the `deepspeed` command with DeepSpeed's defaults."""
    parser = argparse.ArgumentParser(
        prog="deepspeed", description="DeepSpeed's options; see `deepseek-zero run`."
    )
    add = parser.add_argument
    add("-H", "--hostfile", default="/job/hostfile")
    add("-i", "--include", default="")
    add("-e", "--exclude", default="")
    add("--num_gpus", "--num_accelerators", type=int, default=-1)
    add("--master_port", type=int, default=int(os.environ.get("DLTS_MASTER_PORT", 29500)))
    add("--autotuning", default="", choices=["tune", "run", ""])
    add("--ssh_port", type=int)
    add("-q", "--quiet", action="store_true")
    for name in ("num_nodes", "min_elastic_nodes", "max_elastic_nodes", "node_rank"):
        add(f"--{name}", type=int, default=-1)
    texts = {"master_addr": "", "launcher": "pdsh", "launcher_args": "", "log_level": "info"}
    texts |= {"enable_each_rank_log": "None"}
    for name, default in (texts | {"venv_script": None, "bind_core_list": None}).items():
        add(f"--{name}", default=default)
    flags = (
        "module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid "
        "elastic_training bind_cores_to_rank"
    )
    for flag in flags.split():
        add(f"--{flag}", action="store_true")
    add("user_script")
    add("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Launch a program as the `deepspeed` command does. It does not return.

    Raises:
        ValueError: Options that exclude each other are given.
    """
    given = parse_args(args)
    if (given.num_nodes > 0 or given.num_gpus > 0) and (given.include or given.exclude):
        raise ValueError("Cannot specify num_nodes/gpus with include/exclude")
    words = sys.argv[1:] if args is None else list(args)
    os.execv(
        sys.executable, [sys.executable, "-m", "deepseek_zero.cli", "run", "--as-deepspeed", *words]
    )


class MultiNodeRunner:
    """Build the command that starts one process per host or per rank.

    Args:
        args: Result of `parse_args`.
        world_info_base64: Result of `encode_world_info`.
        resource_pool: For each available host, its slots (GPU indices).
    """

    name: ClassVar[str]
    program: ClassVar[str]

    def __init__(
        self, args: argparse.Namespace, world_info_base64: str, resource_pool: Any = None
    ) -> None:
        self.args = args
        self.world_info_base64 = world_info_base64
        self.resource_pool = resource_pool
        self.user_arguments = list(args.user_args)
        self.user_script = args.user_script
        self.exports: dict[str, str] = {}

    def backend_exists(self) -> bool:
        """Return whether the launcher program is on PATH."""
        return shutil.which(self.program) is not None

    def add_export(self, key: str, var: str) -> None:
        """Set an environment variable for all processes.

        Args:
            key: Name of the variable.
            var: Value of the variable.
        """
        self.exports[key.strip()] = var.strip()

    def validate_args(self) -> None:
        """Raise an error if an option is not supported by the launcher program.

        Raises:
            ValueError: --include, --exclude, --num_nodes or --num_gpus is given.
        """
        if self.args.include or self.args.exclude:
            raise ValueError(f"{self.name} backend does not support worker include/exclusion")
        if self.args.num_nodes != -1 or self.args.num_gpus != -1:
            raise ValueError(f"{self.name} backend does not support limiting num nodes/gpus")

    def get_cmd(self, environment: dict[str, str], active_resources: Resources) -> Any:
        """Return the launcher's command line as a list of arguments.

        Args:
            environment: Environment of the launcher process.
            active_resources: For each host to use, its slots (GPU indices) or their number.

        Returns:
            The arguments of the command, of which the first is the name of the program.
        """
        slots = active_resources.values()
        ranks = sum(each if isinstance(each, int) else len(each) for each in slots)
        python = [] if self.args.no_python else [sys.executable, "-u"]
        if self.args.module and python:
            python.append("-m")
        return [
            self.program,
            "-n",
            str(ranks),
            *self._options(ranks, len(active_resources)),
            *self._exports(),
            *python,
            self.user_script,
            *self.user_arguments,
        ]

    def _options(self, ranks: int, hosts: int) -> list[str]:
        return shlex.split(self.args.launcher_args)

    def _exports(self) -> list[str]:
        """Return the options that set `exports`."""
        return []


class PDSHRunner(MultiNodeRunner):
    """Build the command for pdsh, which starts one launcher per host over ssh."""

    name = "pdsh"
    program = "pdsh"

    def get_cmd(self, environment: dict[str, str], active_resources: Resources) -> Any:
        """Return the command line of pdsh, with the values that DeepSpeed's launcher expects.

        Args:
            environment: Environment of the launcher process.
            active_resources: For each host to use, its slots (GPU indices) or their number.

        Returns:
            The command, a placeholder for DeepSpeed's kill command, and the environment.

        Raises:
            ValueError: The hosts have different numbers of slots, or a slot with a lower number is
                left out. All hosts get the same command.
        """
        environment = {**environment, "PDSH_RCMD_TYPE": "ssh"}
        if self.args.ssh_port is not None:
            environment["PDSH_SSH_ARGS_APPEND"] = f"-p {self.args.ssh_port}"
        hosts = ",".join(active_resources)
        command = f"pdsh -S -f {PDSH_MAX_FAN_OUT} -w".split()
        command += [hosts, *shlex.split(self.args.launcher_args)]
        command += [f"export {key}={shlex.quote(value)};" for key, value in self.exports.items()]
        command += [f"cd {shlex.quote(os.path.abspath('.'))};"]
        command += [sys.executable, *"-u -m deepseek_zero.cli run --as-deepspeed".split()]
        command += ["--node_rank=%n", f"--num_nodes={len(active_resources)}"]
        command += [f"--num_gpus={_slots_of_each(active_resources)}"]
        command += [f"--master_addr={self.args.master_addr}"]
        command += [f"--master_port={self.args.master_port}"]
        for flag in ("module", "no_python", "no_local_rank"):
            command += [f"--{flag}"] if getattr(self.args, flag) else []
        # A shell on each host reads the command.
        command += map(shlex.quote, [self.user_script, *self.user_arguments])
        return command, ["pdsh", "-w", hosts, "true"], environment


def _slots_of_each(hosts: Resources) -> int:
    """Return the number of slots of every host, which are its first ones."""
    slots = [list(range(each)) if isinstance(each, int) else list(each) for each in hosts.values()]
    number = len(slots[0]) if slots else 0
    if not number or any(each != list(range(number)) for each in slots):
        raise ValueError(
            f"pdsh starts the same ranks on all hosts, and the selected slots are {dict(hosts)}; "
            "select the same number of slots on each host, from 0 on, or start `deepseek-zero run "
            "--hostfile ... --include ...` on each host"
        )
    return number


class OpenMPIRunner(MultiNodeRunner):
    """Build the command for Open MPI's mpirun, which starts one process per rank."""

    name = "openmpi"
    program = "mpirun"

    def _options(self, ranks: int, hosts: int) -> list[str]:
        given = super()._options(ranks, hosts)
        # By default, MPI may choose an interface that the other hosts cannot reach.
        if not any("btl_tcp_if_include" in option for option in given):
            given = ["--mca", "btl_tcp_if_include", "eth0", *given]
        return ["-hostfile", self.args.hostfile, "--mca", "btl", "^openib", *given]

    def _exports(self) -> list[str]:
        return [word for key, value in self.exports.items() for word in ("-x", f"{key}={value}")]


class MPICHRunner(MultiNodeRunner):
    """Build the command for MPICH's mpirun, which starts one process per rank."""

    name = "mpich"
    program = "mpirun"
    export = "-genv"

    def _options(self, ranks: int, hosts: int) -> list[str]:
        return ["-ppn", str(max(1, ranks // max(1, hosts))), *super()._options(ranks, hosts)]

    def _exports(self) -> list[str]:
        return [word for key, value in self.exports.items() for word in (self.export, key, value)]


class IMPIRunner(MPICHRunner):
    """Build the command for Intel MPI's mpirun."""

    name = "impi"


class MVAPICHRunner(MPICHRunner):
    """Build the command for MVAPICH's mpirun."""

    name = "mvapich"
    export = "-env"


class SlurmRunner(MultiNodeRunner):
    """Build the command for Slurm's srun, which starts one process per rank."""

    name = "slurm"
    program = "srun"

    def _options(self, ranks: int, hosts: int) -> list[str]:
        options = super()._options(ranks, hosts)
        for word, value in (("--nodelist", self.args.include), ("--exclude", self.args.exclude)):
            options += [word, value] if value else []
        for word, number in (("--nodes", self.args.num_nodes), ("--gpus", self.args.num_gpus)):
            options += [word, str(number)] if number > 0 else []
        return options

    def _exports(self) -> list[str]:
        exports = ",".join(["ALL", *(f"{key}={value}" for key, value in self.exports.items())])
        return [f"--export={exports}"]
