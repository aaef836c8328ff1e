"""`python -m deepseek_zero.cli`: the command `deepseek-zero` where the script is not on the
path.
"""

from __future__ import annotations

from deepseek_zero.cli import main

if __name__ == "__main__":
    main()
