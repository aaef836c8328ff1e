"""The corpus of the example is split by file; batches depend only on seed, step and rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.text import Sampler, load_corpus


def library(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def many_files(count: int = 200) -> dict[str, bytes]:
    return {f"module_{number:03}.py": b"x = %03d\n" % number for number in range(count)}


def test_every_file_is_on_exactly_one_side_of_the_split(tmp_path: Path) -> None:
    files = many_files()
    corpus = load_corpus(library(tmp_path, files))
    sides = [bytes(side.tolist()) for side in (corpus.train, corpus.held_out)]
    assert corpus.num_files == len(files)
    assert all((content in sides[0]) != (content in sides[1]) for content in files.values())
    assert 0 < len(sides[1]) < len(sides[0]) / 5


def test_a_new_file_moves_no_other_file_across_the_split(tmp_path: Path) -> None:
    before = load_corpus(library(tmp_path, many_files(100)))
    after = load_corpus(library(tmp_path, many_files(101)))
    assert bytes(after.held_out.tolist()).startswith(bytes(before.held_out.tolist()))


def test_tests_tables_foreign_packages_and_odd_encodings_are_left_out(tmp_path: Path) -> None:
    unwanted = {
        "test/test_a.py": b"unwanted",
        "json/tests/a.py": b"unwanted",
        "site-packages/a.py": b"unwanted",
        "encodings/cp037.py": b"unwanted",
        "_sysconfigdata_x.py": b"unwanted",
        "latin.py": b"unwanted \xe9",
        "readme.txt": b"unwanted",
    }
    corpus = load_corpus(library(tmp_path, {**many_files(), **unwanted}))
    assert corpus.num_files == 200
    assert b"unwanted" not in bytes(corpus.train.tolist()) + bytes(corpus.held_out.tolist())


def test_the_corpus_stays_within_its_limit(tmp_path: Path) -> None:
    corpus = load_corpus(library(tmp_path, many_files()), limit_bytes=800)
    assert len(corpus.train) + len(corpus.held_out) == 800


def test_a_folder_without_python_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds too few Python files"):
        load_corpus(tmp_path)


def test_the_library_of_the_running_python_is_large_enough_to_learn_from() -> None:
    corpus = load_corpus()
    assert len(corpus.train) > 2_000_000
    assert len(corpus.held_out) > 50_000
    assert b"import " in bytes(corpus.train[:100_000].tolist())


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(torch.arange(256, dtype=torch.uint8), batch=3, length=5, seed=1)


def test_targets_are_the_inputs_one_byte_later(sampler: Sampler) -> None:
    inputs, targets = sampler.draw(0)
    assert inputs.shape == targets.shape == (3, 5)
    assert inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_a_batch_depends_only_on_seed_step_and_rank(sampler: Sampler) -> None:
    assert torch.equal(sampler.draw(4, 1)[0], sampler.draw(4, 1)[0])
    other = Sampler(sampler.text, 3, 5, seed=2)
    draws = [sampler.draw(4, 1), sampler.draw(5, 1), sampler.draw(4, 0), other.draw(4, 1)]
    assert len({tuple(inputs.flatten().tolist()) for inputs, _ in draws}) == len(draws)


def test_windows_reach_the_last_byte_and_never_beyond() -> None:
    sampler = Sampler(torch.arange(7, dtype=torch.uint8), batch=64, length=5)
    inputs, targets = sampler.draw(0)
    assert set(inputs[:, 0].tolist()) == {0, 1}
    assert targets.max() == 6
