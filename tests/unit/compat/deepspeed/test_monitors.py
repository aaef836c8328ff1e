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


def test_each_monitor_gets_the_events_of_a_generator(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    config = classes.get_monitor_config({"csv_monitor": section})
    master = monitors.MonitorMaster(config)
    master.monitors.append(monitors.csvMonitor(config.csv_monitor))
    master.write_events((tag, 1.0, 2) for tag in ("loss", "lr"))
    for each in master.monitors:
        each.writer.close()
    assert (tmp_path / "run" / "lr.csv").read_text() == "step,lr\n2,1.0\n2,1.0\n"
