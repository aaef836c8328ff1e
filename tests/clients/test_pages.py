"""Run the how-to pages of clients: write every named code block and run every command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.running import BY_HAND, HERE, PATHS, need_client

PAGES = {
    "accelerate": ["accelerate"],
    "trainer": ["transformers", "accelerate", "peft"],
    "trl": ["trl"],
    "lightning": ["lightning"],
}
SCRIPT = re.compile(
    r"^```python no-run (?P<name>\S+\.py)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL
)
COMMANDS = re.compile(r"^```bash run\n(?P<lines>.*?)^```", re.MULTILINE | re.DOTALL)


@BY_HAND
@pytest.mark.parametrize("page", PAGES)
def test_the_scripts_and_commands_of_a_clients_page_run(page: str, tmp_path: Path) -> None:
    need_client(*PAGES[page])
    text = (HERE.parents[1] / "docs" / "how-to" / f"{page}.md").read_text(encoding="utf-8")
    for script in SCRIPT.finditer(text):
        (tmp_path / script["name"]).write_text(script["code"], encoding="utf-8")
    lines = [line for block in COMMANDS.finditer(text) for line in block["lines"].splitlines()]
    assert lines and text.count("no-run") == len(SCRIPT.findall(text))
    paths = f"{HERE / 'at_start'}:{PATHS}" if page == "lightning" else PATHS
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {
        "PYTHONPATH": paths,
        "PATH": tools,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    for line in lines:
        done = subprocess.run(
            line,
            shell=True,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-1000:]}\n{done.stderr[-4000:]}"
