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
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from ladder.climb import QUIET, ROOT, hide_gpus, split_data, split_ranks, told_by
from megakit.errors import UserError
from megakit.job.command_line import program as command
from megakit.job.script import begin_script
from megakit.runtime.signals import exit_status, handle_signals
from tools.trace_picture import draw
from tools.trace_rank import prepare, run
from tools.trace_table import description, words_of

FOLDER = Path("runs/trace")
LADDER = {name: ROOT / "ladder" / name / "3_megatron.py" for name in ("", "gpt")}
#: Samples of a step, and micro batches of a rank, unless the user gives other sizes.
SAMPLES, MICRO_BATCHES = 8, 2
#: Seconds without a communication of any rank, after which they count as hanging.
PATIENCE = 60


class FailedError(Exception):
    """A rank ended with this error, or the ranks wait for each other."""


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
    data, given = ([], given) if name else split_data(given)
    ranks, arguments = split_ranks(given)
    if name in LADDER:
        arguments = ["--steps", "2", *small(ranks, arguments, ""), *arguments, *data]
    elif "run_script(" in program.read_text():
        arguments = ["--output-dir", folder, *small(ranks, arguments, "global-"), *arguments]
    return program, ranks, arguments


def redirect(stream: int, path: Path) -> int:
    """Lets standard output, 1, or standard error, 2, go to a file; returns what it was before."""
    before = os.dup(stream)
    with path.open("w") as file:
        os.dup2(file.fileno(), stream)
    return before


def record(program: Path, ranks: int, arguments: Sequence[str], folder: Path) -> None:
    """Runs the program on all ranks until its second step; each rank writes a file.

    Raises:
        UserError: The program refuses its options, or makes no step.
        FailedError: It fails, or hangs.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MEGAKIT_COMMAND": program.name}
    job |= QUIET | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    if not torch.cuda.device_count():  # a process that has used CUDA cannot be forked
        before = redirect(2, FOLDER / "start.log")
        try:
            prepare(program)
        finally:
            os.dup2(before, 2)

    def run_rank(rank: int) -> None:
        redirect(1, folder / f"{rank}.txt")
        redirect(2, FOLDER / f"{rank}.log")
        os.environ |= job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        torch.set_num_threads(1)
        run(folder / f"{rank}.json", program, arguments)

    fork = multiprocessing.get_context("fork")  # the frameworks are imported once
    processes = [fork.Process(target=run_rank, args=(rank,)) for rank in range(ranks)]
    try:
        for one in processes:
            one.start()
        while None in (states := [one.exitcode for one in processes]) and not any(states):
            time.sleep(0.05)
            last = [file.stat().st_mtime for file in folder.glob("*.last")]
            if last and time.time() - max(last) > PATIENCE:
                for one in processes:
                    os.kill(one.pid or 0, signal.SIGUSR1)  # which writes its traceback
                time.sleep(1)
                raise FailedError("\n".join(waits(program, ranks, folder)))
        ends = {rank: FOLDER / f"{rank}.log" for rank, state in enumerate(states) if state}
        # The others fail because the first one has ended.
        failed = min(ends, key=lambda rank: ends[rank].stat().st_mtime, default=None)
    finally:
        for one in processes:
            one.kill()
            one.join()
    if failed is not None:
        log_file = FOLDER / f"{failed}.log"
        said = told_by(log_file.read_text(), program.name, log_file)
        if re.search(r"Error\b.*world.?size", said, re.IGNORECASE):
            raise UserError(f"{said} --devices N starts N processes, not {ranks}.".splitlines())
        raise FailedError(f"rank {failed}: {said}")
    if not all((folder / f"{rank}.json").exists() for rank in range(ranks)):
        raise UserError(
            f"{program}: no rank made a training step by Megatron's schedule, "
            "get_forward_backward_func(). Name a program that does."
        )


def waits(program: Path, ranks: int, folder: Path) -> Iterator[str]:
    """Yields for each rank of a job that hangs what it did last, and in which line it is."""
    yield f"the ranks hang: for {PATIENCE} s, none of them has communicated. The last of each:"
    for rank in range(ranks):
        file = folder / f"{rank}.last"
        event = json.loads(file.read_text()) if file.exists() else {"phase": "nothing"}
        words = f": {words_of(event)}" if "bytes" in event else ""
        log = (FOLDER / f"{rank}.log").read_text().rpartition("most recent call first")[2]
        line = re.search(rf'File ".*{re.escape(program.name)}", (line \d+)', log)
        yield f"  rank {rank}, {event['phase']}{words}{f' ({line[1]})' if line else ''}"
    yield f"The tracebacks are in {FOLDER / '*.log'}."


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
    begin_script()
    handle_signals(lambda number, _: sys.exit(exit_status(number)))  # which ends the ranks, too
    given = sys.argv[1:]
    if {"-h", "--help"} & {*given}:
        print(__doc__)
        return 0
    try:
        trace(given)
    except UserError as error:
        for problem in error.problems:
            print(f"{command()}: {problem}", file=sys.stderr)
        return 2
    except FailedError as error:
        print(f"{command()}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
