"""Shows one training step on every rank: coordinates, samples, weights, communication, loss.

    ./run trace [options]               ladder/3_megatron.py, the autoencoder
    ./run trace gpt [options]           ladder/gpt/3_megatron.py, a small GPT
    ./run trace PROGRAM.py [options]    any program that trains by Megatron's schedule

The options are the program's own, such as --tensor-parallel 2. --devices is the
number of processes, by default the smallest that the other options need. They
compute on GPUs if each has one. Of the ladder's programs and of this
project's scripts, the step is small unless you give batch sizes. The table has a
column for each rank; runs/trace/trace.svg is its picture, trace.json its values.
Exit status: 0 success; 1 the program failed; 2 wrong options.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from megakit.errors import UserError

from .programs import hide_gpus, split_ranks
from .ranks import prepare_once, run_ranks, telling
from .recorder import run
from .trace_picture import draw
from .trace_table import description

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("runs/trace")
LADDER = {name: ROOT / "ladder" / name / "3_megatron.py" for name in ("", "gpt")}
#: Samples of a step, and micro batches of a rank, unless the user gives other sizes.
SAMPLES, MICRO_BATCHES = 8, 2


def small(ranks: int, arguments: Sequence[str], prefix: str) -> list[str]:
    """Returns options for a step of few samples, unless the user has given batch sizes."""
    given = dict(pairwise(part for one in arguments for part in one.split("=")))
    tensor, pipeline, context = (
        int(given.get(f"--{name}-parallel", 1)) for name in ("tensor", "pipeline", "context")
    )
    replicas = max(1, ranks // (tensor * pipeline * context))
    number = max(MICRO_BATCHES, pipeline)  # as interleaved stages demand
    size = max(1, SAMPLES // (replicas * number))
    sizes = {f"--{prefix}batch-size": replicas * number * size, "--micro-batch-size": size}
    if sizes.keys() & given.keys():
        return []
    return [str(part) for item in sizes.items() for part in item]


def plan(given: list[str], folder: str) -> tuple[Path, int, list[str]]:
    """Returns the program, the number of its processes, and its arguments.

    Args:
        given: The arguments of the command.
        folder: For what this project's scripts write.

    Raises:
        UserError: There is no such program, or an option is wrong.
    """
    name = given.pop(0) if given and not given[0].startswith("-") else ""
    program = LADDER.get(name, Path(name))
    if not program.is_file():
        raise UserError(f"{name}: there is no such program. Name gpt, or a file that trains.")
    data: list[str] = []
    if not name:
        from ladder.climb import split_data

        data, given = split_data(given)
    ranks, arguments = split_ranks(given)
    if name in LADDER:
        arguments = ["--steps", "2", *small(ranks, arguments, ""), *arguments, *data]
    elif "run_script(" in program.read_text():
        arguments = ["--output-dir", folder, *small(ranks, arguments, "global-"), *arguments]
    return program, ranks, arguments


def record(program: Path, ranks: int, arguments: Sequence[str], folder: Path) -> None:
    """Runs the program on all ranks until its second step; each rank writes a file.

    Raises:
        UserError: The program refuses its options, or makes no step.
        FailedError: It fails, or hangs.
    """
    prepare_once(program, FOLDER / "start.log")

    def work(rank: int) -> None:
        run(program, arguments, folder / f"{rank}.json")

    run_ranks(program, ranks, folder, FOLDER, work)
    if not all((folder / f"{rank}.json").exists() for rank in range(ranks)):
        raise UserError(
            f"{program}: no rank made a training step by Megatron's schedule, "
            "get_forward_backward_func(). Name a program that does."
        )


def trace(given: list[str]) -> None:
    """Records a step, prints it, and draws it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program, ranks, arguments = plan(given, name)
        hide_gpus(ranks)
        record(program, ranks, arguments, folder)
        traces = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        data = [*dict.fromkeys(str(one["batches"]) for one in traces if one["batches"])]
        for one in traces:  # a letter for the tensors that a rank reads
            read = bool(one["batches"])
            one["data"] = chr(ord("A") + data.index(str(one["batches"]))) if read else ""
        printed = (folder / f"{ranks - 1}.txt").read_text().splitlines()
    shown = program.relative_to(ROOT) if program.is_relative_to(ROOT) else program
    last = printed[-1] if printed else ""
    print(*description(str(shown), traces, last), sep="\n")
    (FOLDER / "trace.json").write_text(json.dumps(traces))
    (FOLDER / "trace.svg").write_text(draw(str(shown), traces))
    print(f"The picture is {FOLDER / 'trace.svg'}.")


def main() -> int:
    """Runs the command and returns its exit status."""
    given, command = sys.argv[1:], os.environ.get("MEGAKIT_COMMAND", "trace")
    if {"-h", "--help"} & {*given}:
        print(__doc__)
        return 0
    with telling(command):
        trace(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
