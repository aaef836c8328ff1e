"""Shared fixtures: one seed for every test, and the marker that runs a test's body on every rank of
a world.

    @pytest.mark.ranks(2)                two gloo processes, from a pool reused over the session
    @pytest.mark.ranks("world")          the size is the parametrised argument `world`
    @pytest.mark.ranks(2, timeout=20)    after 20 s the test fails with the ranks that did not
                                         answer, and all ranks are killed
    @pytest.mark.ranks(2, fresh=True)    in new processes, which end after the test
    @pytest.mark.ranks(4, hosts=2)       ranks 0 and 1 on one host, 2 and 3 on another
                                         (tests/hosts.py); requires root
    @pytest.mark.ranks(3, dies=[1])      rank 1 must die during the test; the others must pass
                                         (implies fresh)

The test is a module-level function with picklable arguments: parametrised values and tmp_path,
which all ranks share. `monkeypatch` is a separate object on each rank and is undone after the test.
"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from deepseek_zero.base import log
from deepseek_zero.base.launch import GLOO_INTERFACE, INTERFACE, PORTS
from tests.rank_pool import Outcome, RankPool, Task, seed_everything

# Pytest has already configured logging, so the library would not install its handler.
log.install()

POOLS = pytest.StashKey[dict[tuple[int, int], RankPool]]()  # by number of ranks and hosts


@dataclass(frozen=True)
class RanksMark:
    """The arguments of `@pytest.mark.ranks`."""

    size: int | str
    timeout: float = 60.0
    fresh: bool = False
    dies: tuple[int, ...] | list[int] = ()
    hosts: int = 1


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Accept the options of pyproject.toml without their plugin, which a GPU machine may lack."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini(
            "timeout", "seconds for a test; pytest-timeout is not installed, so nothing ends one"
        )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(size, timeout=60, fresh=False, dies=(), hosts=1): run the body on every rank",
    )
    config.stash[POOLS] = {}
    config.add_cleanup(lambda: [pool.close() for pool in config.stash[POOLS].values()])


MAKES_HOSTS = (
    "unit/test_hosts",
    *(
        f"ranks/test_{name}"
        for name in "faults hosts lost_hosts sockets_between_hosts stragglers worlds".split()
    ),
)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Print the name of a failed test immediately, because the run takes a quarter of an hour."""
    if not report.failed:
        return None
    kind = "failed" if report.when == "call" else "error"
    return kind, f"\n{kind.upper()} {report.nodeid}\n", kind.upper()


@pytest.hookimpl(optionalhook=True)  # defined by xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests over two workers by file (scripts/test).

    Tests that make hosts of namespaces run in the same worker, because they limit and cut links.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return (
                "hosts" if file.removeprefix("tests/").removesuffix(".py") in MAKES_HOSTS else file
            )

    return Scheduling(config, log)


HEARD = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    seed_everything()
    handlers = [(number, signal.getsignal(number)) for number in HEARD]
    listening = {name: os.environ.get(name) for name in (INTERFACE, PORTS, GLOO_INTERFACE)}
    yield
    # An engine exports its interface and ports to programs that start later.
    for (
        name,
        value,
    ) in listening.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    # An engine that saved on a preemption signal ignores that signal afterwards.
    for number, handler in handlers:
        signal.signal(number, handler)
    if dist.is_initialized():  # pytest's own process is not a rank
        dist.destroy_process_group()
        pytest.fail("the test left a process group behind")


@pytest.fixture
def as_deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import the drop-in in this process as if no client were imported; remove it afterwards."""
    dropin = pytest.importorskip("deepseek_zero.compat.deepspeed.dropin")
    for name in dropin.CLIENTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    dropin.install_as_deepspeed()
    yield
    dropin.uninstall_as_deepspeed()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    mark = RanksMark(*marker.args, **marker.kwargs)
    size = pyfuncitem.funcargs[mark.size] if isinstance(mark.size, str) else mark.size
    task = _task(pyfuncitem)
    pools = pyfuncitem.config.stash[POOLS]
    own = mark.fresh or bool(mark.dies)
    pool = None if own else pools.pop((size, mark.hosts), None)
    pool = RankPool(size, mark.hosts) if pool is None else pool
    try:
        outcome = pool.run(task, mark.timeout)
    except BaseException:  # Ctrl-C, pytest-timeout: the ranks may still be busy
        pool.close()
        raise
    if own or outcome.failed:
        pool.close()
    else:
        pools[size, mark.hosts] = pool
    _judge(outcome, mark)
    return True


def _task(item: pytest.Function) -> Task:
    function = item.obj
    if item.cls is not None or function.__qualname__ != function.__name__:
        pytest.fail("A test marked `ranks` must be a plain module-level function.", pytrace=False)
    arguments = {name: item.funcargs[name] for name in inspect.signature(function).parameters}
    try:
        pickled = pickle.dumps(arguments)
    except Exception as error:
        message = (
            f"The arguments of a test marked `ranks` must be picklable, {sorted(arguments)} are "
            f"not: {error}"
        )
        raise pytest.fail.Exception(message, pytrace=False) from None
    filters = pickle.dumps(list(warnings.filters))
    return Task(function.__module__, str(item.path), function.__name__, pickled, filters)


def _judge(outcome: Outcome, mark: RanksMark) -> None:
    """Turn the answers into a pass, a skip or a failure that names each rank."""
    lines = [
        f"rank {rank} failed:\n{a.text}"
        for rank, a in sorted(outcome.answers.items())
        if a.kind == "failed"
    ]
    lines += [
        f"rank {rank} died, exit code {code}\n{outcome.crashes.get(rank, '')}".strip()
        for rank, code in outcome.dead.items()
        if rank not in mark.dies
    ]
    lines += [
        f"rank {rank} did not answer; its stacks:\n{stack}"
        for rank, stack in outcome.silent.items()
    ]
    lines += [
        f"rank {rank} was expected to die and did not"
        for rank in mark.dies
        if rank in outcome.answers
    ]
    skipped = {rank: a.text for rank, a in outcome.answers.items() if a.kind == "skipped"}
    if skipped and len(skipped) < len(outcome.answers):
        lines.append(f"only some ranks skipped: {skipped}")
    if lines:
        limit = (
            [f"(limit {mark.timeout:g} s)"]
            if outcome.silent and len(lines) == len(outcome.silent)
            else []
        )
        pytest.fail("\n".join(lines + limit), pytrace=False)
    if skipped:
        pytest.skip(next(iter(skipped.values())))
