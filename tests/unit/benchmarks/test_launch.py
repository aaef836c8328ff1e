"""A failed run is recorded with its cause and all its processes are ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks import launch as launcher
from benchmarks.launch import Run, launch
from benchmarks.systems import SYSTEMS, Entry


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a script that the ranks run instead of the worker."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(Entry, "python", property(lambda entry: str(script)))
    return script


def test_a_failed_rank_is_named_with_the_end_of_its_output(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.2)
    program.write_text(
        '#!/bin/sh\n[ "$RANK" = 1 ] && { echo "ValueError: too small" >&2; exit 3; }\nexec '
        "sleep 600\n"
    )
    record = launch(Run("tiny-fp32", "ddp"))
    assert record["failed"] == "rank 1 ended with 3: ValueError: too small"


def test_a_run_that_takes_too_long_is_ended_with_all_it_started(
    program: Path, tmp_path: Path
) -> None:
    program.write_text(f'#!/bin/sh\nsleep 600 &\necho $! >> "{tmp_path}/children"\nwait\n')
    # Long enough to start a shell on a busy machine.
    record = launch(Run("tiny-fp32", "ddp", timeout=4.0))
    assert record["failed"].startswith("not done after 4 s")
    children = (tmp_path / "children").read_text().split()
    assert len(children) == 2
    deadline = time.monotonic() + 20
    # The kernel may need some time to end a killed process.
    while any(map(is_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, children))


def is_alive(process: str) -> bool:
    try:
        return "(zombie)" not in Path("/proc", process, "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_every_rank_has_its_variables_in_the_environment(program: Path, tmp_path: Path) -> None:
    seen = "$RANK/$WORLD_SIZE $OMP_NUM_THREADS ${MALLOC_TRIM_THRESHOLD_:-none}"
    program.write_text(f'#!/bin/sh\necho "{seen}" > "{tmp_path}/$RANK"\nexit 1\n')
    launch(Run("tiny-fp32", "ddp", kind="memory"))
    assert [(tmp_path / str(rank)).read_text().strip() for rank in range(2)] == [
        "0/2 1 65536",
        "1/2 1 65536",
    ]
    launch(Run("tiny-fp32", "ddp"))
    assert (tmp_path / "0").read_text().strip() == "0/2 1 none"


def test_a_single_process_system_computes_the_whole_batch() -> None:
    assert [name for name, entry in SYSTEMS.items() if entry.alone] == ["single"]
