"""Format the results as Markdown: environment, goals, and per cell a table of time and one of
memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .goals import goal_table, show
from .journal import read
from .plot import draw
from .summary import Row, Runs, Summary, cells_of, summarise
from .systems import SYSTEMS

QUIET = 0.1  # cores that other programs may use
DISTURBED = " - **this machine was not quiet: trust no difference in time**"
MISSING = {"not_installed": "not installed", "left_out": "left out for lack of time"}
MOMENTS = {
    "init_peak": "initialise peak",
    "initialised": "initialised",
    "steady": "steady",
    "train_peak": "peak",
}


def write_report(results: Path) -> list[Path]:
    """Write NAME.md and NAME.png next to NAME.json; return all three paths."""
    content = read(results)
    summaries = {cell.name: summarise(cell, content["runs"]) for cell in cells_of(content["runs"])}
    page, picture = results.with_suffix(".md"), results.with_suffix(".png")
    draw(list(summaries.values()), picture)
    page.write_text("\n".join(_page(content, summaries, picture.name)) + "\n")
    return [results, page, picture]


def _page(content: Mapping[str, Any], summaries: Mapping[str, Summary], picture: str) -> list[str]:
    lines = ["# Side by side on CPU ranks", "", *about(content["about"], content["runs"]), ""]
    lines += [
        "## Goals (GPT-125M)",
        "",
        *goal_table(summaries),
        "",
        f"![step time over the floor]({picture})",
        "",
    ]
    for summary in summaries.values():
        lines += [f"## {summary.cell.name}", "", *time_table(summary), ""]
        if any(row.memory for row in summary.rows.values()):
            lines += [*memory_table(summary), ""]
        lines += [*remarks(summary), ""]
    return lines[:-1]


def about(facts: Mapping[str, Any], runs: Runs) -> list[str]:
    """Return the facts that readers need to interpret the figures."""
    machine = facts["machine"]
    versions = {name: version for run in runs for name, version in run.get("versions", {}).items()}
    others = [run["others_cores"] for run in runs]
    has = [f"with {flag}" for flag in machine["has"]] + [
        f"without {flag}" for flag in machine["has_not"]
    ]
    return [
        "Written from the JSON file of the same name; `benchmarks/README.md` describes "
        "the measurement.",
        "",
        f"- {facts['date']}, commit {facts['commit']}, "
        f"{', '.join(f'{k} {v}' for k, v in versions.items())}",
        f"- {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"{', '.join(has)}",
        f"- cores that other work took while a run lasted: median {statistics.median(others):.2f}, "
        f"most {max(others):.2f}" + (DISTURBED if statistics.median(others) > QUIET else ""),
        *(f"- {what}: {', '.join(facts[key])}" for key, what in MISSING.items() if facts.get(key)),
    ]


def time_table(summary: Summary) -> list[str]:
    """Return a table of step times and their parts; the fastest correct system is bold."""
    head = (
        "system | rounds | step, s | over floor | fastest over floor | seconds over floor | times "
        "faster than fsdp2 "
    )
    head += (
        "| than deepspeed-3 | tokens/s | CPU s per rank | MB sent per rank | largest loss "
        "difference"
    )
    lines = [f"| {head} |", "|---|" + "--:|" * head.count("|")]
    return lines + [
        _time_line(summary, row) for row in summary.rows.values() if SYSTEMS[row.system].timed
    ]


def _time_line(summary: Summary, row: Row) -> str:
    name = row.system
    if row.median is None:
        return f"| {name} | 0 | {'failed' if row.failed else '-'} |" + " |" * 9
    floor = summary.rows.get("floor")
    beyond = row.median - floor.median if floor is not None and floor.median else None
    tokens = summary.tokens_per_second(name)
    cells = [
        f"**{name}**" if name == summary.fastest_system else name,
        str(row.rounds),
        _seconds(row.median),
        _figure(summary.over_floor(name), 2),
        _figure(summary.over_floor(name, "fastest"), 2),
        _figure(beyond, 3),
        _figure(summary.times_faster(name, "fsdp2"), 2),
        _figure(summary.times_faster(name, "deepspeed-3"), 2),
        _figure(tokens, 0),
        _seconds(row.cpu_seconds),
        f"{(row.sent_bytes or 0) / 1e6:,.1f}{'' if row.counts_itself else '*'}",
        _loss(row),
    ]
    return f"| {' | '.join(cells)} |"


def memory_table(summary: Summary) -> list[str]:
    """Return a table of MB per rank as PSS / USS, and of seconds until the first step is done."""
    head = " | ".join(
        ["system", *(f"{title}, MB" for title in MOMENTS.values()), "peak RSS, exact, MB"]
    )
    head += " | import, s | build, s | initialise, s | first step over later"
    lines = [f"| {head} |", "|---|" + "--:|" * head.count("|")]
    return lines + [_memory_line(row) for row in summary.rows.values() if row.memory or row.seconds]


def _memory_line(row: Row) -> str:
    cells = [row.system, *(_pss_and_uss(row.memory.get(moment)) for moment in MOMENTS)]
    cells.append(f"{row.memory['train_peak']['rss'] / 1e6:.0f}" if row.memory else "-")
    cells += [_figure(row.seconds.get(name), 2) for name in ("import", "build", "initialise")]
    return f"| {' | '.join([*cells, _figure(row.first_over_later, 2)])} |"


def remarks(summary: Summary) -> list[str]:
    """Return remarks that do not fit into the tables."""
    cell, shape = summary.cell, summary.cell.shape
    single = summary.rows.get("single")
    compared = max((row.losses_compared for row in summary.rows.values()), default=0)
    lines = [
        f"{shape.numel / 1e6:.1f}M parameters ({shape.layers} x {shape.width}), {summary.ranks} "
        f"ranks, accumulation {cell.accumulation}. *: bytes of the loopback interface, headers "
        "included; without: the system's own count."
    ]
    if single is None:
        lines.append("`single` was not run, so no losses were compared.")
    else:
        lines.append(f"Losses of {compared} steps against `single`; wrong above {single.bound:g}.")
    for row in summary.rows.values():
        if row.system.startswith("ours") and (psi := summary.psi(row.system)) is not None:
            settings = ", ".join(f"{name} {value}" for name, value in row.settings.items())
            lines.append(
                f"`{row.system}` ({settings}) sent {psi:.3f} times its share of the weights (Psi)."
            )
    lines += [f"`{row.system}` failed: {row.failed}" for row in summary.rows.values() if row.failed]
    return [f"- {line}" for line in lines]


def _loss(row: Row) -> str:
    if row.loss_gap is None:
        return "-"
    return f"**WRONG** {show(row.loss_gap)}" if row.is_wrong else show(row.loss_gap)


def _pss_and_uss(sizes: Mapping[str, int] | None) -> str:
    return f"{sizes['pss'] / 1e6:.0f} / {sizes['uss'] / 1e6:.0f}" if sizes else "-"


def _seconds(value: float | None) -> str:
    """Format seconds with three or four digits: 0.0123, 3.05, 12.3."""
    return "-" if value is None else f"{value:.4f}" if value < 0.1 else f"{value:.3g}"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
