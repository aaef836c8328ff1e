"""Every path argument refuses a URL, which would create a local folder named `s3:`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import deepseek_zero
from deepseek_zero.base.errors import ConfigError, NotBuiltError, UsageError
from deepseek_zero.base.given import is_url, whole_number
from deepseek_zero.checkpoint.convert import convert_to_pth, convert_to_safetensors
from deepseek_zero.compat.deepspeed.checkpoint import convert_to_deepspeed
from deepseek_zero.compat.deepspeed.data_pipeline.indexed_dataset import MMapIndexedDatasetBuilder
from deepseek_zero.compat.deepspeed.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)

URL = "s3://bucket/run"
PATH = Path(URL)  # pathlib collapses the slashes to s3:/bucket/run
CONFIG = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "steps_per_print": None}


@pytest.mark.parametrize(
    "path", [URL, PATH, "gs://a", "file:///tmp/x", "hdfs://host/x", "https://x/y", "abfss://c@a/x"]
)
def test_a_text_with_a_scheme_is_a_url(path: Any) -> None:
    assert is_url(path)


@pytest.mark.parametrize(
    "path", ["run", "/s3:/x", "./s3:/x", "a:b", "C:/x", "step:1", "runs/s3://x", ""]
)
def test_other_texts_are_paths(path: Any) -> None:
    assert not is_url(path)


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "save_checkpoint": lambda engine, url: engine.save_checkpoint(url),
    "load_checkpoint": lambda engine, url: engine.load_checkpoint(url),
    "save_16bit_model": lambda engine, url: engine.save_16bit_model(url),
    "export": lambda engine, url: engine.export(url),
    "export of a file": lambda engine, url: engine.export(f"{url}/model.pth"),
    "load_weights": lambda engine, url: engine.load_weights(url),
    "zero.load_weights": lambda engine, url: deepseek_zero.zero.load_weights(nn.Linear(2, 2), url),
    "explain": lambda engine, url: engine.explain(url),
    "convert_to_safetensors": lambda engine, url: convert_to_safetensors(Path(url), Path("out")),
    "convert_to_pth": lambda engine, url: convert_to_pth(Path("saved"), Path(url)),
    "convert_to_deepspeed": lambda engine, url: convert_to_deepspeed(Path("saved"), Path(url)),
    "get_fp32_state_dict": lambda engine, url: get_fp32_state_dict_from_zero_checkpoint(url),
    "convert_to_fp32": lambda engine, url: convert_zero_checkpoint_to_fp32_state_dict("saved", url),
    "indexed dataset": lambda engine, url: MMapIndexedDatasetBuilder(url),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("run"))
        engine = deepseek_zero.initialize(model=nn.Linear(2, 2), config=CONFIG)[0]
        engine.save_checkpoint("saved")
        yield engine
        engine.destroy()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("url", [URL, PATH], ids=["text", "Path"])
def test_a_url_is_refused_and_no_folder_is_created(engine: Any, call: str, url: Any) -> None:
    before = sorted(os.listdir())
    with pytest.raises(NotBuiltError, match=r"s3:/+bucket/run.* is a URL"):
        CALLS[call](engine, url)
    assert sorted(os.listdir()) == before


def test_a_memory_trace_is_refused_before_the_block_runs(engine: Any) -> None:
    with (
        pytest.raises(NotBuiltError, match="is a URL"),
        engine.memory_trace("s3://bucket/memory.png"),
    ):
        pytest.fail("the block ran")


@pytest.mark.parametrize(
    "key",
    [
        "zero_optimization.offload_param.nvme_path",
        "zero_optimization.offload_optimizer.nvme_path",
        "activation_checkpointing.nvme_path",
        "tensorboard.output_path",
        "csv_monitor.output_path",
        "records.path",
        "checkpoint.save_on_signal.path",
        "flops_profiler.output_file",
    ],
)
def test_every_path_of_the_configuration_is_local(key: str) -> None:
    config: dict[str, Any] = dict(CONFIG)
    *sections, last = key.split(".")
    section = config
    for name in sections:
        section = section.setdefault(name, {})
    section[last] = URL
    with pytest.raises(ConfigError, match=f"{key}.*is a URL"):
        deepseek_zero.initialize(model=nn.Linear(2, 2), config=config)


@pytest.mark.parametrize(
    "words",
    [
        ["checkpoint", "inspect", URL],
        ["checkpoint", "verify", URL],
        ["checkpoint", "prune", URL],
        ["checkpoint", "convert", URL, "out"],
        ["checkpoint", "convert", "saved", URL],
        ["run", "--log-dir", URL, "train.py"],
    ],
    ids=" ".join,
)
def test_the_command_line_refuses_a_url(tmp_path: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "deepseek_zero", *words]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2 and "is a URL" in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def test_integers_of_numpy_are_whole_numbers() -> None:
    assert whole_number("call", "size", np.int64(8), 1) == 8
    for value in (np.float32(8), np.True_, True, np.int64(0)):
        with pytest.raises(UsageError, match="call\\(size="):
            whole_number("call", "size", value, 1)
