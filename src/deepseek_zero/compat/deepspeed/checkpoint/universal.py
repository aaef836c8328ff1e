"""DeepSpeed's `ds_to_universal`: copy a checkpoint for any number of ranks.

This library loads every checkpoint at any number of ranks, including DeepSpeed's. The result is
therefore a copy that the file `latest_universal` names. Programs that convert a checkpoint before
they load it at another size still work. DeepSpeed itself cannot load the copy at another size.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ....base.errors import CheckpointError
from ....checkpoint import files
from ....checkpoint.format import LATEST_UNIVERSAL
from ....checkpoint.read import open_checkpoint, resolve_checkpoint
from ....checkpoint.staging import staged_output

_AT_ONCE = 1 << 24  # bytes per read


def parse_arguments() -> argparse.Namespace:
    """Parse the command-line options of DeepSpeed's script."""
    parser = argparse.ArgumentParser(description="Copy a checkpoint for any number of ranks.")
    parser.add_argument("--input_folder", required=True, help="the folder of one checkpoint")
    parser.add_argument("--output_folder", required=True, help="the folder to write")
    for name in ("--num_extract_workers", "--num_merge_workers"):
        parser.add_argument(name, type=int, default=1, help="accepted; files are copied one by one")
    for name in ("--keep_temp_folder", "--no_strict", "--inject_missing_state"):
        parser.add_argument(name, action="store_true", help="accepted; nothing is taken apart")
    return parser.parse_args()


def main(args: Any = None) -> None:
    """Copy the checkpoint `args.input_folder` to `args.output_folder`.

    If the input is a directory of checkpoints, the one that the file `latest` names is copied.

    Args:
        args: Parsed options; None to parse the command line.

    Raises:
        CheckpointError: The input is not a checkpoint, or the output exists.
    """
    given = args if args is not None else parse_arguments()
    source = resolve_checkpoint(Path(given.input_folder), None)
    out = Path(given.output_folder)
    with ExitStack() as stack:
        open_checkpoint(source, None, stack)  # raises if the folder is not a checkpoint
    if out.exists():
        raise CheckpointError(
            f"'{out}' exists already.", fix="name another output_folder, or remove that one."
        )
    with staged_output(out) as draft:
        for path in sorted(path for path in source.iterdir() if path.is_file()):
            with open(path, "rb") as given_file, files.new_file(draft.path / path.name) as written:
                while part := given_file.read(_AT_ONCE):
                    written.write(part)
        draft.publish_folder()
    files.replace_text(out.parent / LATEST_UNIVERSAL, out.name)
