"""How long a save stops training: the first of a process, and those after it.

    python benchmarks/checkpoint.py [--starts N] [--write]

Pretraining as a user starts it, on the bundled digits, saving every 10 steps; a save is all from
the call to the folder's final name: weights, optimizer, context, manifest with digests, everything
on disk, and the removal of older checkpoints. `--write` puts the figures into RESULTS.md.
"""

import argparse
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import HEADER, REPOSITORY, Row, machine, write_section

SAVES = 20


def timed_run(times: Path, folder: Path) -> None:
    """Runs the script in this process, and writes down each save's seconds."""
    from megakit.checkpoints.writer import CheckpointWriter

    original = CheckpointWriter.save

    def save(self: Any, *args: Any, **kwargs: Any) -> Path:
        began = time.perf_counter()
        path = original(self, *args, **kwargs)
        with times.open("a") as file:
            print(time.perf_counter() - began, file=file)
        return path

    CheckpointWriter.save = save  # type: ignore[method-assign]
    script = str(REPOSITORY / "model_pretrain.py")
    options = ["--dataset", "digits", "--data-dir", folder / "no-data", "--output-dir", folder]
    options += ["--max-steps", 10 * SAVES, "--save-interval", 10, "--val-interval", 10 * SAVES]
    sys.argv = [script, *map(str, options)]
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a save stops training.")
    parser.add_argument("--starts", type=int, default=5, help="processes to start")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    parser.add_argument("--run", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        timed_run(*options.run)
    first, later = [], []
    for _ in range(options.starts):
        with tempfile.TemporaryDirectory() as folder:
            times = Path(folder, "times")
            subprocess.run(
                [sys.executable, __file__, "--run", times, Path(folder, "runs")],
                check=True,
                capture_output=True,
            )
            seconds = [float(line) for line in times.read_text().splitlines()]
        first.append(1000 * seconds[0])
        later += [1000 * value for value in seconds[1:]]
    rows = [
        Row("the first save of a process", first, "ms", f"{options.starts} processes"),
        Row("a later save", later, "ms", f"{len(later)} saves"),
    ]
    caption = machine("nemo_toolkit", "megatron-core")
    title = "## A save, with context and manifest"
    text = "\n".join([title, "", caption, "", *HEADER, *map(str, rows)])
    print(text)
    if options.write:
        write_section("checkpoint", text)


if __name__ == "__main__":
    main()
