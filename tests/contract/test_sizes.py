"""The ratchet on sizes: nothing above a ceiling but what size_exceptions.txt lists, and that list only shrinks."""

from __future__ import annotations

from pathlib import Path

from tests.contract.sizes import CEILINGS, measure

ROOT = Path(__file__).resolve().parents[2]
EXCEPTIONS = Path(__file__).with_name("size_exceptions.txt")


def test_nothing_is_larger_than_its_ceiling_but_the_listed_exceptions() -> None:
    above = _above_the_ceilings(ROOT)
    listed = _exceptions()
    grown = {key: size for key, size in above.items() if size > listed.get(key, CEILINGS[key[0]])}
    assert not grown, f"too large: {grown}; ceilings: {CEILINGS}"


def test_every_listed_exception_is_still_needed_at_exactly_its_size() -> None:
    above = _above_the_ceilings(ROOT)
    stale = {
        key: f"listed as {size}, is {above.get(key, 'under the ceiling')}"
        for key, size in _exceptions().items()
        if above.get(key) != size
    }
    assert not stale, f"bring {EXCEPTIONS.name} down to what is true: {stale}"


def test_the_measure_sees_each_kind_of_excess(tmp_path: Path) -> None:
    source = ["class Large:", "    def method(self, a, b, c, d, *, e, f, g):"]
    source += [f"        self.x{index} = {index}" for index in range(70)]
    source += [f"    def m{index}(self): ..." for index in range(21)] + ["# line"] * 500
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "large.py").write_text("\n".join(source))
    place = "src/large.py"
    assert _above_the_ceilings(tmp_path) == {
        ("file", place): 593,
        ("function", f"{place}::Large.method"): 71,
        ("arguments", f"{place}::Large.method"): 7,
        ("methods", f"{place}::Large"): 22,
        ("attributes", f"{place}::Large"): 70,
    }


def _above_the_ceilings(root: Path) -> dict[tuple[str, str], int]:
    return {(size.kind, size.where): size.value for size in measure(root) if size.value > CEILINGS[size.kind]}


def _exceptions() -> dict[tuple[str, str], int]:
    listed = {}
    for line in EXCEPTIONS.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            kind, where, size, reason = line.split(maxsplit=3)
            assert kind in CEILINGS, line
            assert reason, line
            listed[kind, where] = int(size)
    return listed
