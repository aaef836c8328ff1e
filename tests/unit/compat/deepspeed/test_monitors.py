"""Test the monitors of DeepSpeed."""

from __future__ import annotations

from pathlib import Path

from deepseek_zero.compat.deepspeed import config_classes as classes
from deepseek_zero.compat.deepspeed import (
    monitors,
)


def test_a_monitor_writes_what_its_section_configures(tmp_path: Path) -> None:
    section = classes.CSVConfig(enabled=True, output_path=str(tmp_path), job_name="job")
    monitor = monitors.csvMonitor(section)
    monitor.write_events([("Train/loss", 0.5, 3)])
    monitor.writer.close()
    assert (tmp_path / "job" / "Train_loss.csv").read_text().split() == ["step,loss", "3,0.5"]
    assert not monitors.MonitorMaster(classes.get_monitor_config({})).enabled
