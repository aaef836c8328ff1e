"""Run the command `deepseek-zero` as `python -m deepseek_zero`."""

from __future__ import annotations

from deepseek_zero.cli import main

if __name__ == "__main__":
    main()
