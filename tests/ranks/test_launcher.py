"""The launcher with real processes: the environment of ranks and the end of failing runs.

Most scripts do not import torch, and most tests use `Ranks` directly, so that a test takes a
fraction of a second. Only tests of the whole command import torch once.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import deepseek_zero
from deepseek_zero.base.launch import SECRET_FILE
from deepseek_zero.cli import agent
from deepseek_zero.cli.orphans import Launch
from deepseek_zero.cli.ranks import Command, Death, Ranks, Target
from tests.hosts import free_port

MOST_SECONDS = 5.0
"""From the death of a rank to the end of all: the launcher's promise."""

SOURCE = str(Path(deepseek_zero.__path__[0]).parent)


def write(folder: Path, source: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return path


@dataclass
class Ended:
    """The result of a run of `Ranks`."""

    death: Death | None
    cause: Death | None
    seconds: float  # from noticing the failure to the end of all processes
    left: list[int]
    folder: Path


def run_ranks(command: Command, size: int = 2, limit: float = 100.0) -> Ended:
    """Start and poll ranks as the agent does, without torch."""
    with Ranks(command) as ranks:
        ranks.start([{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)])
        deadline = time.monotonic() + limit
        death = None
        while (
            not ranks.finished and (death := ranks.poll()) is None and time.monotonic() < deadline
        ):
            ranks.wait(0.1)
        noticed = time.monotonic()
        if death:
            ranks.end()
        seconds = time.monotonic() - noticed
        assert death or ranks.finished, "the ranks neither finished nor failed in time"
        return Ended(
            death, ranks.cause(), seconds, Launch(ranks.mark, set()).living(), ranks._folder
        )


def run_script(script: Path, *args: str, size: int = 2) -> Ended:
    return run_ranks(Command(Target.SCRIPT, str(script), args), size)


def test_a_script_has_the_environment_of_a_plain_start(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import json, os, sys, beside
        main = [__name__, __file__, __package__, __spec__, __doc__,
                sys.modules["__main__"].__dict__ is globals()]
        names = sorted(name for name in globals() if not name.startswith("__"))
        open(sys.argv[1] + os.environ.get("RANK", ""), "w").write(
            json.dumps([sys.argv, sys.path, main, names]))
        """,
    )
    write(tmp_path, "", "beside.py")
    args = [str(tmp_path / "seen"), "--run", "--", "-x"]
    assert run_script(script, *args, size=1).cause is None
    subprocess.run([sys.executable, str(script), *args], check=True)
    assert json.loads((tmp_path / "seen0").read_text()) == json.loads(
        (tmp_path / "seen").read_text()
    )


def test_module_mode_is_that_of_python_m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    write(tmp_path / "package", "VALUE = 4", "part.py")
    write(
        tmp_path / "package",
        """
        import sys
        from .part import VALUE
        open(sys.argv[1], "w").write(f"{VALUE} {__name__} {__spec__.name} {sys.path[0]}")
        """,
        "train.py",
    )
    ended = run_ranks(Command(Target.MODULE, "package.train", ("seen",)), size=1)
    assert ended.cause is None
    assert (tmp_path / "seen").read_text() == f"4 __main__ package.train {Path.cwd()}"


def test_a_program_without_the_library_is_unchanged(tmp_path: Path) -> None:
    command = Command(Target.PROGRAM, "sh", ("-c", f"echo $RANK > {tmp_path}/rank$RANK; exit 5"))
    ended = run_ranks(command, size=1)
    assert ended.cause is not None
    assert (ended.cause.exit_code, (tmp_path / "rank0").read_text()) == (5, "0\n")


def test_classes_of_the_script_pickle_and_spawned_processes_find_them(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import multiprocessing, pickle, sys

        class Sample:
            def __init__(self, value): self.value = value

        def double(sample): return Sample(2 * sample.value)

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                back = pool.map(double, [pickle.loads(pickle.dumps(Sample(4)))])
            open(sys.argv[1], "w").write(str([type(one) is Sample and one.value for one in back]))
        """,
    )
    assert run_script(script, str(tmp_path / "seen"), size=1).cause is None
    assert (tmp_path / "seen").read_text() == "[8]"


def test_an_exit_handler_still_finds_the_scripts_main(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import atexit, pickle, sys
        class Sample: pass
        @atexit.register
        def last(): open(sys.argv[1], "wb").write(pickle.dumps(Sample()))
        """,
    )
    assert run_script(script, str(tmp_path / "seen"), size=1).cause is None
    assert b"Sample" in (tmp_path / "seen").read_bytes()


@pytest.mark.parametrize(
    ("ending", "code", "story"),
    [
        ("sys.exit(3)", 3, "no traceback"),
        ("os._exit(4)", 4, "no traceback"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
        ("sys.exit('that is all')", 1, "that is all"),
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
        ("ctypes.string_at(0)", 139, "in <module>"),
    ],
)
def test_every_kind_of_failure_has_its_exit_code_and_report_and_ends_all(
    tmp_path: Path, ending: str, code: int, story: str
) -> None:
    script = write(
        tmp_path,
        f"""
        import ctypes, os, signal, sys, time
        if os.environ["RANK"] == "1":
            {ending}
        time.sleep(100)
        """,
    )
    ended = run_script(script)
    assert ended.cause is not None
    assert (ended.cause.rank, ended.cause.exit_code) == (1, code)
    assert story in ended.cause.story()
    assert ended.seconds < MOST_SECONDS
    assert ended.left == []
    assert not ended.folder.exists()


@pytest.mark.parametrize("ending", ["sys.exit()", "sys.exit(0)", "os._exit(0)", "pass"])
def test_every_normal_exit_is_no_failure_and_ends_no_other_rank(
    tmp_path: Path, ending: str
) -> None:
    script = write(
        tmp_path,
        f"""
        import os, sys, time
        if os.environ["RANK"] == "0":
            {ending}
        else:
            time.sleep(0.5)
            open(sys.argv[1], "w").write("done")
        """,
    )
    assert run_script(script, str(tmp_path / "seen")).cause is None
    assert (tmp_path / "seen").read_text() == "done"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_of_ranks_arrive_at_once_and_whole(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    unbuffered: str,
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    script = write(
        tmp_path,
        """
        import os, sys
        open(sys.argv[1] + os.environ["RANK"], "w").close()
        while not os.path.exists(sys.argv[1] + "0") or not os.path.exists(sys.argv[1] + "1"):
            pass
        for _ in range(3000):
            print("x" * 50)
        os._exit(0)  # nothing is flushed at the end
        """,
    )
    assert run_script(script, str(tmp_path / "up")).cause is None
    assert capfd.readouterr().out == ("x" * 50 + "\n") * 6000


def test_a_traceback_begins_in_the_script(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path, "def f():\n    raise ValueError('boom')\nf()\n")
    ended = run_script(script, size=1)
    plain = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert ended.cause is not None
    assert ended.cause.story() == plain.stderr.rstrip()
    assert capfd.readouterr().err == "", "the rank itself must not print what the launcher shows"


def test_the_exception_hook_of_a_script_writes_the_report(tmp_path: Path) -> None:
    hook = (
        "import sys\nsys.excepthook = lambda kind, error, trace: print('HOOK', error, "
        "file=sys.stderr)\n"
    )
    ended = run_script(write(tmp_path, hook + "raise ValueError('boom')\n"), size=1)
    assert ended.cause is not None
    assert ended.cause.story() == "HOOK boom"


def test_the_rank_that_failed_first_is_the_cause_not_the_one_that_ended_first(
    tmp_path: Path,
) -> None:
    script = write(
        tmp_path,
        """
        import os, sys, time, atexit
        sys.path.insert(0, sys.argv[1])
        flag = sys.argv[2]
        if os.environ["RANK"] == "1":
            atexit.register(lambda: (open(flag, "w").close(), time.sleep(0.5)))
            raise ValueError("the cause")
        while not os.path.exists(flag):
            time.sleep(0.001)
        class PeerError(RuntimeError): pass
        raise PeerError("rank 1 is gone")
        """,
    )
    ended = run_script(script, SOURCE, str(tmp_path / "flag"))
    assert ended.cause is not None
    assert ended.cause.story().endswith("ValueError: the cause")


def test_a_rank_that_raised_and_does_not_exit_ends_the_others_all_the_same(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os, threading, time
        if os.environ["RANK"] == "0":
            threading.Thread(target=time.sleep, args=(100,)).start()
            raise ValueError("boom")
        time.sleep(100)
        """,
    )
    ended = run_script(script)
    assert ended.cause is not None
    assert ended.cause.exit_code == 1
    assert ended.seconds < MOST_SECONDS
    assert ended.left == []


STUBBORN = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
    # known by its mark only
    stranger = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
    # known by its group only
    nameless = subprocess.Popen([sys.executable, "-c", child], env={})
    pids = sys.argv[1] + os.environ["RANK"]
    open(pids + ".part", "w").write(f"{os.getpid()} {stranger.pid} {nameless.pid}")
    os.rename(pids + ".part", pids)
    while not os.path.exists(sys.argv[1] + "0") or not os.path.exists(sys.argv[1] + "1"):
        time.sleep(0.01)
    if os.environ["RANK"] == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)
"""


def test_ranks_and_children_that_ignore_signals_are_killed_in_time(tmp_path: Path) -> None:
    ended = run_script(write(tmp_path, STUBBORN), str(tmp_path / "up"), "1")
    assert ended.cause is not None
    assert ended.cause.exit_code == 137
    assert ended.seconds < MOST_SECONDS
    assert living(tmp_path) == []


def test_the_ranks_of_a_killed_launcher_and_their_children_end(tmp_path: Path) -> None:
    script = write(tmp_path, STUBBORN)
    launcher = write(
        tmp_path,
        """
        import sys, time
        from deepseek_zero.cli.ranks import Command, Ranks, Target
        with Ranks(Command(Target.SCRIPT, sys.argv[1], (sys.argv[2], "none"))) as ranks:
            ranks.start([{"RANK": "0"}, {"RANK": "1"}])
            while True:
                ranks.wait(1)
        """,
        "launcher.py",
    )
    command = [sys.executable, str(launcher), str(script), str(tmp_path / "up")]
    environment = {**os.environ, "PYTHONPATH": SOURCE, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment)
    wait_until(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists(), 60)
    assert len(living(tmp_path)) == 6
    process.kill()
    process.wait()
    wait_until(lambda: not living(tmp_path), MOST_SECONDS)
    wait_until(lambda: not list(tmp_path.glob("deepseek_zero_*")), MOST_SECONDS)


def living(folder: Path) -> list[int]:
    """Return the running processes listed in STUBBORN's files, without zombies."""
    pids = [int(pid) for rank in (0, 1) for pid in (folder / f"up{rank}").read_text().split()]
    return [pid for pid in pids if runs(pid)]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.02)


def test_the_first_rank_keeps_the_terminal_and_the_others_may_log_to_files(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import os, sys\nprint(os.environ['RANK'], sys.stdout.isatty(), sys.stdin.isatty())\n",
    )
    logs = tmp_path / "logs"
    launcher = write(
        tmp_path,
        f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {SOURCE!r})
        from deepseek_zero.cli.ranks import Command, Ranks, Target
        with Ranks(Command(Target.SCRIPT, {str(script)!r}, log_dir=Path({str(logs)!r}))) as ranks:
            ranks.start([{{"RANK": "0"}}, {{"RANK": "1"}}])
            while not ranks.finished:
                ranks.wait(0.1)
                assert ranks.poll() is None
        """,
        "launcher.py",
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(launcher)], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    assert process.wait(60) == 0
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert shown.split() == ["0", "True", "True"]
    assert (logs / "rank_1.log").read_text().split() == ["1", "False", "False"]


# The whole command.


@contextmanager
def started(*line: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run the launcher as a process and kill it at the end if it still runs.

    Its guard then ends the ranks.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_", "MKL_", "RANK"))
    }
    environment |= {"PYTHONPATH": SOURCE, "COLUMNS": "200", **variables}
    command = [sys.executable, "-m", "deepseek_zero.cli", "run", *line]
    pipe = subprocess.PIPE
    # Background jobs of a shell ignore SIGINT, and their children would inherit this.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe)
    signal.signal(signal.SIGINT, before)
    with process:
        try:
            yield process
        finally:
            process.kill()


def run_command(*line: str, **variables: str) -> tuple[int, str, str]:
    with started(*line, **variables) as process:
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err


PROBE = """
    import argparse, json, os, sys
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    known, _ = parser.parse_known_args(
        [one for one in sys.argv[1:] if one.startswith("--local_rank")])
    seen = {"argv": sys.argv[1:], "local_rank": known.local_rank, **os.environ}
    open(f"seen_{os.environ['RANK']}", "w").write(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, object]]]:
    """Return the environment that two ranks of one real launch have recorded."""
    folder = tmp_path_factory.mktemp("probe")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write(folder, PROBE, "probe.py")
        code, out, err = run_command(
            "--nproc", "2", "probe.py", "--run", "--nproc", "7", "--", "-x"
        )
        assert (code, out, err) == (0, "", "")
        yield [json.loads((folder / f"seen_{rank}").read_text()) for rank in range(2)]


def test_every_rank_has_its_coordinates(probed: list[dict[str, object]]) -> None:
    for rank, seen in enumerate(probed):
        place = [
            seen[name]
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
        ]
        assert place == [str(rank), str(rank), "2", "2", "2"]
        assert seen["MASTER_ADDR"] == "127.0.0.1"
    assert probed[0]["MASTER_PORT"] == probed[1]["MASTER_PORT"] != "0"


def test_the_scripts_arguments_arrive_untouched_after_local_rank(
    probed: list[dict[str, object]],
) -> None:
    for rank, seen in enumerate(probed):
        assert seen["argv"] == [f"--local_rank={rank}", "--run", "--nproc", "7", "--", "-x"]
        assert seen["local_rank"] == rank


def test_ranks_share_the_cores(probed: list[dict[str, object]]) -> None:
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert {seen[name] for seen in probed for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} == {
        threads
    }


def test_a_failure_is_logged_once_with_its_exit_code(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('b' + "
        "'oom')\ntime.sleep(90)\n",
    )
    code, out, err = run_command("--nproc", "3", str(script))
    assert (code, out) == (1, "")
    lines = err.strip().splitlines()
    assert lines[0] == "rank 1 of 3 failed with exit code 1; all ranks here have been ended"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: boom"
    assert len(lines) == 5


def test_ranks_that_raise_a_moment_after_another_are_not_ended_before_they_do(
    tmp_path: Path,
) -> None:
    """Errors often occur on every rank, and each script may handle its error."""
    script = write(
        tmp_path,
        """
        import os, sys, time
        rank = int(os.environ["RANK"])
        open(sys.argv[1] + "up" + str(rank), "w").close()
        while not all(os.path.exists(sys.argv[1] + "up" + str(each)) for each in range(3)):
            time.sleep(0.001)
        try:
            time.sleep(0.1 * rank)
            raise ValueError(f"of rank {rank}")
        finally:
            open(sys.argv[1] + "said" + str(rank), "w").close()
        """,
    )
    code, _, err = run_command("--nproc", "3", str(script), f"{tmp_path}/")
    assert code == 1 and err.strip().endswith("ValueError: of rank 0")
    assert [(tmp_path / f"said{rank}").exists() for rank in range(3)] == [True, True, True]


def test_gpus_that_are_not_there_are_replaced_with_one_line(tmp_path: Path) -> None:
    script = write(
        tmp_path, "import os\nprint(os.environ['WORLD_SIZE'], os.environ['OMP_NUM_THREADS'])\n"
    )
    code, out, err = run_command(
        "--num_gpus", "800", str(script), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="5"
    )
    nproc = max(2, len(os.sched_getaffinity(0)))
    assert (code, out) == (0, f"{nproc} 5\n" * nproc)
    assert err.count("INFO") == err.count("\n") == 1
    assert "800 GPUs" in err and f"running {nproc} CPU ranks" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_launcher_that_gets_a_termination_signal_ends_its_ranks(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    script = write(
        tmp_path,
        """
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        print(os.environ["DEEPSEEK_ZERO_LAUNCH"], flush=True)
        time.sleep(100)
        """,
    )
    with started("--nproc", "2", str(script)) as process:
        assert process.stdout is not None
        mark = process.stdout.readline().strip()
        process.stdout.readline()
        asked = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
        assert process.returncode == code
        assert time.monotonic() - asked < MOST_SECONDS
    assert Launch(mark, set()).living() == []
    assert err.strip() == f"the launcher received {number.name}; all ranks here have been ended"


def test_a_process_group_forms_and_its_survivors_complaint_is_not_the_cause(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os, signal, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(total)
        if dist.get_rank() == 1:
            print(total.item(), torch.get_num_threads(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)
        """,
    )
    code, out, err = run_command("--nproc", "2", str(script))
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert (code, out.split()) == (137, ["3.0", str(threads)])
    assert "rank 1 of 2 was ended by signal 9 (SIGKILL)" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_restart_starts_all_ranks_again(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 0:
            raise ValueError("first time")
        dist.barrier()
        print("well", flush=True)
        """,
    )
    code, out, err = run_command(
        "--nproc", "2", "--max-restarts", "1", "--master_port", str(free_port()), str(script)
    )
    assert (code, out) == (0, "well\nwell\n"), err
    assert "restarting" in err
    assert "Traceback" not in err


def test_two_nodes_connect_and_a_failure_on_one_ends_the_other(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os, sys, time
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK")
        print(*[os.environ[name] for name in names], flush=True)
        open(sys.argv[1] + os.environ["RANK"], "w").close()
        if os.environ["RANK"] == "2":
            while not os.path.exists(sys.argv[1] + "0") or not os.path.exists(sys.argv[1] + "1"):
                time.sleep(0.01)
            raise KeyError("boom")
        time.sleep(90)
        """,
    )
    up = str(tmp_path / "up")
    line = ["--num_nodes=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    with (
        started(*line, "--node_rank=0", "--nproc=2", str(script), up) as first,
        started(*line, "--node_rank=1", "--nproc=1", str(script), up) as second,
    ):
        outputs = [process.communicate(timeout=120) for process in (first, second)]
        assert [first.returncode, second.returncode] == [1, 1]
    assert sorted(outputs[0][0].splitlines()) == ["0 0 3 0", "1 1 3 0"]
    assert outputs[1][0].splitlines() == ["2 0 3 1"]
    assert all(
        err.count("KeyError: 'boom'") == 1 and "rank 2 of 3 failed" in err for _, err in outputs
    )
    assert f"on {socket.gethostname()};" in outputs[0][1]


def test_one_launcher_on_each_node_of_a_slurm_step_is_one_training(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os
        print(*[os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK")])
        """,
    )
    job = str(free_port() - 20000)  # Slurm's port is 20000 plus the job id
    step = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "localhost,another",
    }
    with (
        started(
            "--nproc=2", str(script), **step, SLURM_PROCID="0", SLURM_NODEID="0", SLURM_LOCALID="0"
        ) as first,
        started(
            "--nproc=1", str(script), **step, SLURM_PROCID="1", SLURM_NODEID="1", SLURM_LOCALID="0"
        ) as second,
    ):
        outputs = [process.communicate(timeout=120) for process in (first, second)]
        assert [first.returncode, second.returncode] == [0, 0], outputs
    assert sorted(outputs[0][0].splitlines()) == ["0 0 3 0", "1 1 3 0"]
    assert outputs[1][0].splitlines() == ["2 0 3 1"]
    on_one = step | {
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": "1",
    }
    code, out, err = run_command("--nproc=1", str(script), **on_one)
    assert (code, out) == (2, "") and "Slurm started 2 copies of this launcher" in err


@pytest.mark.parametrize("asked", [True, False], ids=["input", "all streams"])
def test_a_launcher_that_lost_its_connection_ends_with_its_ranks(
    tmp_path: Path, asked: bool
) -> None:
    """sshd closes the pipes of a command without a terminal if its client is killed."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the test run itself may use nohup
    script = write(
        tmp_path,
        """
        import os, sys, time
        with open(sys.argv[1] + os.environ["RANK"], "w") as file:
            file.write(str(os.getpid()))
        time.sleep(90)
        """,
    )
    up = [tmp_path / f"up{rank}" for rank in range(2)]
    option = ["--end-with-input"] if asked else []
    command = [
        sys.executable,
        "-m",
        "deepseek_zero.cli",
        "run",
        *option,
        "--nproc=2",
        str(script),
        str(tmp_path / "up"),
    ]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": SOURCE}, **pipes) as launcher:
        wait_until(lambda: all(path.exists() and path.read_text() for path in up), 120)
        ranks = [psutil.Process(int(path.read_text())) for path in up]
        assert (
            launcher.stdin is not None
            and launcher.stdout is not None
            and launcher.stderr is not None
        )
        for stream in (
            (launcher.stdin,) if asked else (launcher.stdin, launcher.stdout, launcher.stderr)
        ):
            stream.close()
        wait_until(lambda: not any(map(psutil.Process.is_running, ranks)), MOST_SECONDS)
        assert launcher.wait(60) == 128 + signal.SIGHUP
        if asked:
            told = launcher.stderr.read().decode()
            assert "standard input has ended" in told and "the launcher received SIGHUP" in told


# Ranks that save before they end. The script replaces engine/preemption.py, without torch.

SAVER = f"""
    import os, signal, sys, time
    sys.path.insert(0, {SOURCE!r})
    from deepseek_zero.base.launch import is_ending, report_saving_signals

    rank, (up, *wanted) = int(os.environ["RANK"]), sys.argv[1:]
    asked = []

    def hear(number, frame):
        if is_ending():
            open(f"{{up}}{{rank}}.ended", "w").close()
            os._exit(1)
        asked.append(signal.Signals(number).name)

    for name in ("SIGTERM", "SIGUSR1"):
        signal.signal(signal.Signals[name], hear)
    report_saving_signals(["SIGTERM", "SIGUSR1"])
    open(f"{{up}}{{rank}}", "w").close()
    while not set(wanted) <= set(asked):
        time.sleep(0.01)
    time.sleep(0.3 * rank)  # ranks never leave at quite the same moment
    open(f"{{up}}{{rank}}.saved", "w").close()
    sys.exit(85)
"""


def test_ranks_that_save_and_exit_one_by_one_are_no_failure(
    tmp_path: Path,
) -> None:
    script = write(tmp_path, SAVER)
    with Ranks(Command(Target.SCRIPT, str(script), (str(tmp_path / "up"), "SIGTERM"))) as ranks:
        ranks.start([{"RANK": "0"}, {"RANK": "1"}])
        wait_until(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists(), 60)
        assert ranks.save_on(signal.SIGTERM) and not ranks.save_on(signal.SIGUSR2)
        ranks.pass_on(signal.SIGTERM)
        wait_until(lambda: ranks.poll() or ranks.saved, 60)
        assert ranks.saved and not ranks.finished
        assert (tmp_path / "up1.saved").exists()


@pytest.mark.parametrize(
    ("other", "patience", "code", "story"),
    [("sys.exit(3)", 30.0, 3, "no traceback"), ("time.sleep(100)", 0.5, 85, "kept running")],
)
def test_a_rank_that_saved_and_exited_is_the_failure_only_if_others_remain(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    other: str,
    patience: float,
    code: int,
    story: str,
) -> None:
    monkeypatch.setattr("deepseek_zero.cli.ranks.LEAVING_SECONDS", patience)
    script = write(
        tmp_path,
        f"""
        import os, sys, time
        if os.environ["RANK"] == "0":
            sys.exit(85)
        time.sleep(0.2)
        {other}
        """,
    )
    ended = run_script(script)
    assert ended.cause is not None
    assert (ended.cause.exit_code, story in ended.cause.story()) == (code, True)
    assert ended.left == []


def test_surviving_ranks_get_an_error_after_the_death_of_a_rank(tmp_path: Path) -> None:
    script = write(tmp_path, SAVER)
    with Ranks(Command(Target.SCRIPT, str(script), (str(tmp_path / "up"), "SIGTERM"))) as ranks:
        pids = ranks.start([{"RANK": "0"}, {"RANK": "1"}])
        wait_until(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists(), 60)
        os.kill(pids[0], signal.SIGKILL)
        wait_until(ranks.poll, 60)
        ranks.end()
        cause = ranks.cause()
        assert cause is not None and cause.exit_code == 137
    assert (tmp_path / "up1.ended").exists() and not (tmp_path / "up1.saved").exists()


def test_a_launcher_passes_requests_on_and_ends_with_the_code_of_ranks_that_saved(
    tmp_path: Path,
) -> None:
    line = [
        "--nproc",
        "2",
        "--max-restarts",
        "3",
        str(write(tmp_path, SAVER)),
        str(tmp_path / "up"),
    ]
    with started(*line, "SIGUSR1", "SIGTERM") as process:
        wait_until(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists(), 60)
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 85, err
    assert (tmp_path / "up0.saved").exists() and (tmp_path / "up1.saved").exists()
    assert "received SIGUSR1" in err and "received SIGTERM" in err
    assert "all ranks saved and ended (exit code 85)" in err
    assert "restarting" not in err and "failed" not in err


def test_ranks_that_do_not_save_within_the_grace_are_ended(tmp_path: Path) -> None:
    line = [
        "--save-grace",
        "0.5",
        "--nproc",
        "2",
        str(write(tmp_path, SAVER)),
        str(tmp_path / "up"),
    ]
    with started(*line, "never") as process:
        wait_until(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists(), 60)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "have not saved and ended within 0.5 s of SIGTERM" in err
    assert (tmp_path / "up0.ended").exists() and (tmp_path / "up1.ended").exists()


def test_the_ranks_of_a_launch_share_a_private_secret(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os, sys
        path = os.environ["DEEPSEEK_ZERO_SECRET_FILE"]
        secret, mode = open(path, "rb").read(), oct(os.stat(path).st_mode & 0o777)
        arguments = open(f"/proc/{os.getppid()}/cmdline", "rb").read()
        arguments += open("/proc/self/cmdline", "rb").read()
        forms = (secret, secret.hex().encode(), path.encode())
        told = hash(secret) if any(form in arguments for form in forms) else "hidden"
        print(os.environ["RANK"], path, mode, len(secret), told, secret.hex()[:8])
        """,
    )
    command = [sys.executable, "-m", "deepseek_zero.cli", "run", "--nproc", "2", str(script)]
    environment = {name: value for name, value in os.environ.items() if name != SECRET_FILE}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    lines = sorted(line.split() for line in done.stdout.splitlines() if line[:2] in ("0 ", "1 "))
    assert [line[2:5] for line in lines] == [["0o600", "32", "hidden"]] * 2, done.stdout
    assert lines[0][1:] == lines[1][1:], "one secret for all"
    assert not Path(lines[0][1]).exists(), "which goes with the launch"
    assert lines[0][5] not in done.stderr


def test_a_stopped_rank_is_named_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent, "TELL_AFTER", 0.3)
    monkeypatch.setattr(agent, "LOOK_SECONDS", 0.05)
    script = write(
        tmp_path, "import sys, time\nwhile not open(sys.argv[1]).read():\n    time.sleep(0.01)\n"
    )
    end, standstill = write(tmp_path, "", "end"), agent.Standstill()
    with Ranks(Command(Target.SCRIPT, str(script), (str(end),))) as ranks:
        pids = ranks.start([{"RANK": "4"}, {"RANK": "5"}])
        os.kill(pids[1], signal.SIGSTOP)
        wait_until(lambda: (standstill.look(ranks), standstill.logged_stopped)[1], 60)
        assert standstill.logged_stopped == {5} and ranks.poll() is None
        os.kill(pids[1], signal.SIGCONT)
        wait_until(lambda: (standstill.look(ranks), not standstill.logged_stopped)[1], 60)
        end.write_text("now")
        wait_until(lambda: (ranks.poll(), ranks.finished)[1], 60)
    here = socket.gethostname()
    assert [line for line in caplog.messages if "rank" in line] == [
        f"rank 5 on {here} is stopped; the others wait for it",
        f"rank 5 on {here} continues",
    ]


def test_a_rank_that_runs_between_two_checks_is_not_reported_as_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "TELL_AFTER", 0.3)
    monkeypatch.setattr(agent, "LOOK_SECONDS", 0.0)
    standstill = agent.Standstill()
    with Ranks(Command(Target.SCRIPT, str(write(tmp_path, "while True:\n    pass\n")))) as ranks:
        (pid,) = ranks.start([{"RANK": "4"}]).values()
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            os.kill(pid, signal.SIGSTOP)
            wait_until(ranks.stopped, 60)
            standstill.look(ranks)
            assert not standstill.logged_stopped, "it has had time of its core since the last look"
            before = psutil.Process(pid).cpu_times().user
            os.kill(pid, signal.SIGCONT)
            wait_until(lambda: psutil.Process(pid).cpu_times().user > before, 60)  # noqa: B023
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: (standstill.look(ranks), standstill.logged_stopped)[1], 60)
