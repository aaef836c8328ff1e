"""Figures in pages are those of the tables that they cite (benchmarks/results).

A figure in the text of a link is in the linked file. Other figures of a sentence are in the file of
the next link, or in that of the last one. Figures in a page's table are in the files that its
section cites. A figure may be rounded, a ratio may be given as a percentage (1.26 as 26 %, 0.96 as
96 %), and units may differ by a thousand (MiB and GiB, ms and s).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]*)\)")
NUMBER = re.compile(r"(?<![\w.\-/])(?P<number>\d[\d,]*(?:\.\d+)?)(?P<percent> ?%)?(?![\w/])")
SENTENCE_END = re.compile(r"(?<=[.;:])\s+(?=[A-Z\"`\[(!*])")


def figures(text: str) -> Iterator[tuple[str, bool]]:
    """Yield (number, whether it is a percentage) of a text outside code spans."""
    for found in NUMBER.finditer(re.sub(r"`[^`]*`", " ", text)):
        yield found["number"].replace(",", ""), bool(found["percent"])


def values_of(path: Path) -> list[float]:
    """Return all numbers in a file of results."""
    return [
        float(found["number"].replace(",", ""))
        for found in NUMBER.finditer(path.read_text(encoding="utf-8"))
    ]


def is_among(number: str, is_percentage: bool, values: list[float]) -> bool:
    decimals = len(number.partition(".")[2])
    close = 0.5 * 10.0**-decimals + 1e-9
    for value in values:
        same = (
            (value, value * 100, (value - 1) * 100)
            if is_percentage
            else (value, value / 1000, value * 1000)
        )
        if any(abs(each - float(number)) <= close for each in same):
            return True
    return False


def wrong_figures(page: Path) -> list[str]:
    """Return the figures of a page that no cited table contains."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = []
    for section in re.split(r"^(?=#{1,4} )", text, flags=re.MULTILINE):
        cited = [target for _, target in _cited(section, page)]
        if not cited:
            continue
        for paragraph in re.split(r"\n\s*\n|^(?=[-*] )", section, flags=re.MULTILINE):
            if paragraph.startswith("|"):
                found += _wrong_in_table(
                    paragraph, [value for path in cited for value in values_of(path)]
                )
                continue
            for sentence in SENTENCE_END.split(" ".join(paragraph.split())):
                found += _wrong_in_sentence(sentence, page)
    return found


def _cited(text: str, page: Path) -> list[tuple[re.Match[str], Path]]:
    links = [(link, (page.parent / link["target"]).resolve()) for link in LINK.finditer(text)]
    return [
        (link, path)
        for link, path in links
        if path.parent.name == "results" and path.suffix == ".md"
    ]


def _wrong_in_sentence(sentence: str, page: Path) -> list[str]:
    cited = _cited(sentence, page)
    found, begin = [], 0
    for place, (link, path) in enumerate(cited):
        is_last = place == len(cited) - 1
        outside = sentence[begin : link.start()] + (" " + sentence[link.end() :] if is_last else "")
        values = values_of(path)
        text = link["text"] + " " + LINK.sub(" ", outside)
        found += [
            f"{number}{' %' if percent else ''}: not in {path.name}: {sentence}"
            for number, percent in figures(text)
            if not is_among(number, percent, values)
        ]
        begin = link.end()
    return found


def _wrong_in_table(table: str, values: list[float]) -> list[str]:
    """Return wrong figures in cells that begin with a figure; powers of two count as settings."""
    found = []
    for row in table.splitlines():
        for cell in row.strip("|").split("|")[1:]:
            if not re.match(r"\s*\d", cell):
                continue
            found += [
                f"{number}: in no table that the section cites: {row}"
                for number, percent in figures(cell)
                if not is_among(number, percent, values) and not _is_power_of_two(number)
            ]
    return found


def _is_power_of_two(number: str) -> bool:
    return number.isdigit() and int(number).bit_count() == 1


CITING = [
    str(path.relative_to(ROOT)) for path in PAGES if "results/" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", CITING)
def test_the_figures_of_a_page_are_in_the_tables_that_it_cites(page: str) -> None:
    assert not wrong_figures(ROOT / page)


TABLE = (
    "| a | time |\n|---|---|\n| ours | 1.26 |\n| other | 0.96 |\n| long | 20480 |\n| MiB | 1477 |\n"
)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("It costs [26 %](results/a.md).", []),
        ("It costs [25 %](results/a.md).", ["25 %"]),
        ("It takes [0.96 of the time](results/a.md), and 1.3 at most.", []),
        ("It takes [0.95 of the time](results/a.md), and 1.4 at most.", ["0.95", "1.4"]),
        ("Up to 20,480 tokens with 1.48 GiB ([figures](results/a.md)).", []),
        ("Up to 10,240 tokens ([figures](results/a.md)). Another 7.", ["10240"]),
        ("Nothing is cited: 7.", []),
        ("| | tokens |\n|---|---|\n| ours | 20,480 |\n\nSee [figures](results/a.md).", []),
        (
            "| | tokens |\n|---|---|\n| ours | 20,481 with 512 |\n\nSee [figures](results/a.md).",
            ["20481"],
        ),
    ],
)
def test_a_wrong_figure_would_be_found(tmp_path: Path, text: str, wrong: list[str]) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.md").write_text(TABLE)
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{text}\n")
    assert [each.partition(":")[0] for each in wrong_figures(page)] == wrong
