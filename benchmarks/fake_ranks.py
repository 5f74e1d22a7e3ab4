"""How long fake ranks take: the set-up of a job, and all that `./run layout` prints of 1,024 ranks.

    python benchmarks/fake_ranks.py [--runs 5] [--write]

The set-up is a process's second; the first imports the frameworks. `./run layout` is measured from
Enter to result, in processes of their own, on the bundled digits.
"""

import argparse
import subprocess
import time

from report import HEADER, REPOSITORY, Row, machine, write_section

WORLD_SIZES = (8, 64, 1024, 4096)
#: How 1,024 ranks are laid out, and how many of them differ.
LAYOUTS = {(4, 2): 8, (64, 2): 128}


def seconds_of_set_up(world_size: int) -> float:
    from megakit.testing import fake_ranks

    began = time.perf_counter()
    with fake_ranks(
        world_size - 1, world_size, tensor_model_parallel_size=2, pipeline_model_parallel_size=2
    ):
        return time.perf_counter() - began


def seconds_of_layout(tensor: int, pipeline: int) -> float:
    options = f"--tensor-parallel {tensor} --pipeline-parallel {pipeline}"
    options += " --devices 8 --num-nodes 128 --global-batch-size 1024 --dataset digits"
    command = [str(REPOSITORY / "run"), "layout", *options.split()]
    began = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "1024 processes" in done.stdout
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="How long fake ranks take.")
    parser.add_argument("--runs", type=int, default=5, help="of each measurement")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    seconds_of_set_up(8)
    rows = [
        Row(
            f"set-up of one of {size:,} ranks, TP2 x PP2",
            [1000 * seconds_of_set_up(size) for _ in range(options.runs)],
            "ms",
        )
        for size in WORLD_SIZES
    ]
    rows += [
        Row(
            f"`./run layout`: 1,024 ranks, TP{tensor} x PP{pipeline}",
            [seconds_of_layout(tensor, pipeline) for _ in range(options.runs)],
            "s",
            f"{number} different ranks",
        )
        for (tensor, pipeline), number in LAYOUTS.items()
    ]
    where = machine("nemo_toolkit", "megatron-core", device="cpu")
    lines = ["## Fake ranks", "", f"{where} {options.runs} runs each."]
    text = "\n".join([*lines, "", *HEADER, *map(str, rows)])
    print(text)
    if options.write:
        write_section("fake_ranks", text)


if __name__ == "__main__":
    main()
