"""Runs benchmarks one after the other, each of which writes its section of RESULTS.md.

./run benchmarks [NAME...] [--data-dir PATH]
"""

import argparse
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from report import DATA_DIR

from megakit.errors import UserError
from mnist.files import find_dataset

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder.

    Attributes:
        minutes: About how long it takes on 2 cores.
        what: What it measures.
        arguments: Its command line, the script's name first.
        needs_images: Whether it takes --data-dir.
    """

    minutes: int
    what: str
    arguments: tuple[str, ...]
    needs_images: bool = True


ALL = {
    "steps": Benchmark(11, "training steps/s beside plain loops and ladder/", ("steps.py",)),
    "times": Benchmark(5, "from Enter to result, by script, and memory", ("times.py",)),
    "clone": Benchmark(12, "from git clone to predictions, caches cold, beside pip", ("clone.py",)),
    "growth": Benchmark(4, "what larger batches, models and data cost", ("growth.py",), False),
    "data": Benchmark(2, "the speed of the data system", ("data.py",)),
    "chain": Benchmark(3, "accuracy and time of the whole tutorial, by seed", ("chain.py",)),
    "labels": Benchmark(20, "what pretraining is worth", ("chain.py", "--labels")),
    "photos": Benchmark(3, "right answers for photos of digits, by kind", ("photos.py",)),
    "vit": Benchmark(15, "accuracy, time and memory of examples/vit, by seed", ("vit.py",)),
    "gpt": Benchmark(10, "loss and time of examples/gpt, by seed", ("gpt.py",), False),
    "parallel": Benchmark(
        5, "layouts against one process: differences and speed", ("parallel.py",), False
    ),
    "rounding": Benchmark(
        20, "layouts against one process: by how much rounding makes them differ", ("rounding.py",)
    ),
    "faults": Benchmark(17, "runs killed at random moments", ("faults.py", "--runs", "50"), False),
}


def main() -> int:
    lines = [
        textwrap.fill(f"  {name:11} {one.what} ({one.minutes} min)", 79, subsequent_indent=" " * 14)
        for name, one in ALL.items()
    ]
    parser = argparse.ArgumentParser(
        prog="run benchmarks",
        description="Runs benchmarks and writes benchmarks/RESULTS.md; by default all of them:\n"
        + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; in this order")
    parser.add_argument(
        "--data-dir",
        metavar="PATH",
        type=Path,
        default=DATA_DIR,
        help="folder that contains MNIST/raw (default: the variable MNIST_DATA_DIR, or data)",
    )
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in ALL]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(ALL)}")
    names, failed = options.names or [*ALL], []
    if any(ALL[name].needs_images for name in names):
        try:
            find_dataset(options.data_dir, "mnist")
        except UserError:
            parser.exit(
                2,
                f"benchmarks: {options.data_dir}: MNIST is not complete there, and cannot be "
                "downloaded. Name its folder by --data-dir or the variable MNIST_DATA_DIR.\n",
            )
    for name in names:
        benchmark = ALL[name]
        script, *arguments = benchmark.arguments
        data = ["--data-dir", str(options.data_dir)] if benchmark.needs_images else []
        print(f"== {name}, about {benchmark.minutes} min", file=sys.stderr, flush=True)
        began = time.monotonic()
        command = [sys.executable, str(HERE / script), *arguments, *data, "--write"]
        if subprocess.call(command):
            failed.append(name)
        print(f"== {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
