"""Progress is written as lines to a log and drawn on a terminal, only on rank 0."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from deepseek_zero.report.records import StepRecord
from examples.progress import Progress

RECORD = StepRecord(1, 3.0, 1e-3, 0.7, 10_000.0, 2**20, 3 * 2**20, 0.5)


def show(total: int, every: int, *, terminal: bool = False, **changes: object) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=60, _environ={"TERM": "xterm"})
    with Progress(total, every, console) as progress:
        for step in range(1, total + 1):
            progress.step(replace(RECORD, step=step, loss=float(step), **changes))  # type: ignore[arg-type]
    return out.getvalue()


def test_a_log_gets_a_line_at_the_first_step_every_n_and_the_last() -> None:
    lines = show(total=25, every=10).splitlines()
    assert [line.split("/")[0] for line in lines] == ["step  1", "step 10", "step 20", "step 25"]


def test_a_log_gets_no_control_characters_and_no_wrapped_lines() -> None:
    text = show(total=3, every=1)
    assert text.count("\n") == 3
    assert all(character.isprintable() or character == "\n" for character in text)


def test_a_log_line_covers_the_steps_since_the_previous_line() -> None:
    line = show(total=20, every=10).splitlines()[-1]
    for part in (
        "loss 15.500",
        "lr 1.00e-03",
        "grad norm 0.70",
        "10.0k tok/s",
        "memory 1.00 MiB",
        "comm 3.00 MiB",
    ):
        assert part in line  # the mean loss of steps 11 to 20 is 15.5
    assert "skipped" not in line
    assert "scale" not in line


def test_skipped_steps_are_counted_and_their_losses_left_out() -> None:
    out = io.StringIO()
    progress = Progress(3, 3, Console(file=out))
    progress.step(RECORD)
    progress.step(replace(RECORD, step=2, loss=float("inf"), skipped=True, loss_scale=512.0))
    progress.step(replace(RECORD, step=3, loss=2.0, loss_scale=512.0))
    last = out.getvalue().splitlines()[-1]
    assert "loss 2.000" in last
    assert "loss scale 512" in last
    assert "skipped 1" in last


def test_a_validation_loss_is_logged_immediately() -> None:
    assert show(total=5, every=100, held_out_loss=2.25).count("held-out 2.250") == 5


def test_a_terminal_gets_a_bar_and_the_same_lines() -> None:
    text = show(total=4, every=2, terminal=True)
    assert "\x1b[" in text
    assert "4/4" in text
    assert text.count("grad norm") == 3


def test_the_progress_bar_is_removed_when_training_raises() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, _environ={"TERM": "xterm"})
    with pytest.raises(ZeroDivisionError), Progress(4, 2, console):
        raise ZeroDivisionError
    assert out.getvalue().rstrip("\n").endswith("\x1b[?25h")  # shows the cursor again


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert show(total=3, every=1, terminal=True) == ""


def test_texts_of_the_caller_are_printed_unchanged() -> None:
    out = io.StringIO()
    Progress(1, 1, Console(file=out, width=20)).print_line("weights[0] are written to a long path")
    assert out.getvalue() == "weights[0] are written to a long path\n"
