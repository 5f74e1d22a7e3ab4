"""What only a machine with an NVIDIA GPU can show, the most valuable first, in under six minutes.

    benchmarks/gpu_check.sh [--write] [--data-dir PATH] [ROW...]

Prints each row when it is there; with `--write`, RESULTS.md then has it, too, so a check that is
cut off keeps its rows, and tells which are missing. With ROWs, only these run, and other rows of
the same day and machine stay. A failure does not stop the check; the exit status is then 1. Speeds
are measured one after the other, and nothing runs beside them; the other rows run beside each
other.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import steps
from report import DATA_DIR, REPOSITORY, RESULTS, Section, short
from times import SCRIPTS, accuracy

HEADER = "| what | seconds | |"
#: As many processes import their packages beside each other, and as many rows run.
BESIDE = max(1, min(8, (os.cpu_count() or 1) // 2))
#: In another process: one that has opened the GPU keeps it.
DESCRIBE = """
import json, sys
sys.path.insert(0, "benchmarks")
from report import machine
import torch

found = machine("lightning", "nemo_toolkit", "megatron-core", device="gpu").rstrip(".")
print(json.dumps([f"{found}; CUDA {torch.version.cuda}", torch.cuda.device_count()]))
"""
#: Runs a script with a CUDA graph of its steps. A script imports model_trainer late.
WITH_GRAPH = """
import runpy, sys, wrapt

sys.path.insert(0, "benchmarks")
from peer import use_graph

wrapt.register_post_import_hook(use_graph, "model_trainer")
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
#: The largest relative difference of losses in float32 that is rounding.
ROUNDING = 1e-5


def run(*command: object, status: int = 0, **variables: str) -> str:
    """Runs Python in the repository, and returns what it prints.

    Raises:
        RuntimeError: The exit status is another one.
    """
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != status:
        what = " ".join(map(str, command))
        told = f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        raise RuntimeError(f"exit status {done.returncode} of {what}\n{told}")
    return done.stdout


def at_once(*works: Callable[[], Any]) -> None:
    """Does these beside each other; raises the first error."""
    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result()


@dataclass
class Machine:
    """What the rows share.

    Attributes:
        options: The command line.
        gpus: The number of GPUs.
        folder: A folder for runs.
        speeds: The section of the speeds.
    """

    options: argparse.Namespace
    gpus: int
    folder: Path
    speeds: Section

    def few(self, steps: int) -> int:
        """The steps of a training, fewer in a rehearsal."""
        return min(steps, self.options.max_steps or steps)

    @property
    def job(self) -> dict[str, Any]:
        """The arguments of a peer's training."""
        given = self.options
        return {"data_dir": given.data_dir.absolute(), "dataset": given.dataset, "device": "gpu"}

    def script(
        self, name: str, *arguments: object, out: str, before: Sequence[str] = (), **more: Any
    ) -> Path:
        """Runs a script of the tutorial, and returns its folder of runs."""
        given = self.options
        data = ["--data-dir", given.data_dir.absolute(), "--dataset", given.dataset]
        if "gpt" in name:  # its text is in every Python
            data = []
        runs = self.folder / out
        common = [*data, "--accelerator", "gpu", "--output-dir", runs]
        run(*before, name, *common, *arguments, **more)
        return runs

    # --- Speeds, which are measured alone ---------------------------------------------------------

    def profile(self) -> str:
        """Calls, copies and the time of the GPU per step, ours beside plain PyTorch."""
        jobs = {
            peer: steps.profile_job(peer, **self.job) for peer in ("ours", "fused", "ours_graph")
        }
        return self.each(
            jobs, lambda peer, told: (steps.PROFILE_HEADER, [steps.profile_row(peer, told)])
        )

    def speed(self, batch: int, rounds: int, peers: Sequence[str]) -> str:
        """Steps per second at a micro batch; the peers take turns."""
        job = steps.job_of(batch, self.few(600), threads=1, **self.job)
        jobs = {(n, peer): {**job, "peer": peer} for n in range(rounds) for peer in peers}
        measured: steps.Measured = {}

        def rows(key: tuple[int, str], told: steps.Told) -> tuple[str, list[str]]:
            measured.setdefault((key[1], 1), []).append(told)
            return steps.BATCH_HEADER, steps.batch_rows(batch, measured)

        return self.each(jobs, rows)

    def each(
        self,
        jobs: dict[Any, dict[str, Any]],
        rows: Callable[[Any, steps.Told], tuple[str, list[str]]],
    ) -> str:
        """Trains in turns, and puts the rows of each training; raises at the end what failed."""
        failed = []
        for key, training in steps.in_turns(jobs, BESIDE):
            try:
                told = training.result()
            except SystemExit as error:
                print(error, file=sys.stderr, flush=True)
                failed.append(jobs[key]["peer"])
                continue
            header, found = rows(key, told)
            self.speeds.put(header, *found)
            rate = short(told["steps_per_second"])
            print(f"{jobs[key]['peer']}: {rate} steps/s", flush=True)
        if failed:
            raise RuntimeError(", ".join(failed))
        return "passed"

    # --- Results, which are measured beside each other --------------------------------------------

    def pretrain(self, out: str, count: int, *arguments: object, **more: Any) -> Path:
        """Pretrains for some steps, and returns the folder of runs."""
        return self.script(
            "model_pretrain.py", "--max-steps", self.few(count), *arguments, out=out, **more
        )

    def graph(self) -> str:
        """Trains in a CUDA graph, and without one."""
        given = (200, "--micro-batch-size", 128)
        at_once(
            lambda: self.pretrain("eager", *given),
            lambda: self.pretrain("graph", *given, before=["-c", WITH_GRAPH]),
        )
        return self.same("eager", "graph")

    def chain(self) -> str:
        """The three scripts at their defaults, in bf16-mixed."""
        for script in SCRIPTS:
            few = None if "predict" in script else self.options.max_steps
            given = ("--max-steps", few) if few else ()
            runs = self.script(script, *given, out="chain")
        return f"passed: accuracy {accuracy(runs):.2f}%"

    def resumption(self) -> str:
        """Stops a training after half of its steps, however long the start takes."""
        half = self.few(200) // 2
        given = (2 * half, "--save-interval", max(1, half // 5))
        place = "megakit.nemo.callbacks:StopOnSignal.on_train_batch_start"
        hook = os.pathsep.join(["tests/faults/hook", os.environ.get("PYTHONPATH", "")])
        fault: Any = {
            "FAULT": f"{place}:{half + 1} SIGTERM 0",
            "PYTHONPATH": hook.rstrip(os.pathsep),
        }

        def stopped() -> None:
            self.pretrain("stopped", *given, status=143, **fault)
            self.pretrain("stopped", *given)

        at_once(lambda: self.pretrain("whole", *given), stopped)
        return self.same("whole", "stopped")

    def blocking(self) -> str:
        """Two scripts whose host waits for each kernel: a race between streams would differ."""

        def two(out: str, **more: str) -> None:
            for script in SCRIPTS[:2]:
                self.script(script, "--max-steps", self.few(100), out=out, **more)

        at_once(lambda: two("free"), lambda: two("blocked", CUDA_LAUNCH_BLOCKING="1"))
        return self.same("free", "blocked", ("pretrain", "finetune"))

    def same(self, one: str, other: str, stages: Sequence[str] = ("pretrain",)) -> str:
        """Compares the metrics of two runs byte by byte."""
        for stage in stages:
            first, second = (self.folder / runs / stage / "metrics.csv" for runs in (one, other))
            if first.read_bytes() != second.read_bytes():
                tables = f"{first.read_text()}\nand\n{second.read_text()}"
                raise RuntimeError(f"{stage}/metrics.csv differs:\n{tables}")
        return "passed: metrics.csv identical"

    def proof(self) -> str:
        """The losses of the first steps, ours beside those of the peers."""
        peers = ["1_torch", "fused", "fused_graph", "2_lightning", "3_megatron"]
        found = steps.same_mathematics(peers, max(1, BESIDE // 2), **self.job)
        told = "; ".join(
            f"{steps.TITLES[peer]} {found[peer, '32']:.1e}, {found[peer, 'bf16-mixed']:.1e}"
            for peer in peers
        )
        if max(found[peer, "32"] for peer in peers) > ROUNDING:
            raise RuntimeError(told)
        return f"passed: {told}"

    def tests(self) -> str:
        """The tests marked gpu, each beside others if pytest-xdist is there."""
        beside = ["-n", BESIDE, "--dist", "worksteal"] if find_spec("xdist") else []
        told = run("-m", "pytest", "-q", "-m", "gpu", "tests/gpu", *beside)
        return f"passed: {told.splitlines()[-1].strip('= ')}"

    def two_gpus(self) -> str:
        """Two ranks on two GPUs, joined by NCCL."""
        if self.gpus < 2:
            return "skipped: one GPU, and NCCL wants one for each rank"
        layouts = ("--tensor-parallel", 2), ("--pipeline-parallel", 2), ()
        for script, layout in zip(SCRIPTS, layouts, strict=True):
            self.script(script, "--devices", 2, *layout, out="two")
        return "passed"

    def example(self, name: str) -> str:
        """A few steps of an example."""
        few = ("--max-steps", self.few(20), "--limit-val-batches", 2)
        self.script(f"examples/{name}/model_pretrain.py", *few, out=name)
        return "passed"


@dataclass(frozen=True)
class Row:
    """A row of the check.

    Attributes:
        what: Its first cell.
        seconds: About how long it takes on an H100 with 16 cores.
        work: Measures; returns the last cell.
        is_alone: Whether nothing may run beside it.
    """

    what: str
    seconds: int
    work: Callable[[Machine], str]
    is_alone: bool = False


FIRST, CORRUPTED = (
    ("ours", "ours_graph", "fused", "fused_by_hand"),
    ("ours_corrupted", "ours_graph_corrupted"),
)
LARGE = (*FIRST, *CORRUPTED)
PEERS = (*FIRST, "1_torch", "fused_graph", "2_lightning", "3_megatron", *CORRUPTED)
ROWS = {
    "profile": Row("a profile of the step", 25, Machine.profile, True),
    "speed": Row("steps/s, micro batch 128", 100, lambda m: m.speed(128, 2, PEERS), True),
    "large": Row("steps/s, micro batch 65,536", 50, lambda m: m.speed(65536, 1, LARGE), True),
    "graph": Row("a CUDA graph of the step, beside none", 35, Machine.graph),
    "chain": Row("pretrain, finetune, predict, bf16-mixed", 60, Machine.chain),
    "resumption": Row("resumption", 40, Machine.resumption),
    "blocking": Row("CUDA_LAUNCH_BLOCKING=1, beside none", 45, Machine.blocking),
    "proof": Row(
        "losses of the peers: relative difference, float32, bf16-mixed", 70, Machine.proof
    ),
    "tests": Row("tests marked gpu", 100, Machine.tests),
    "two-gpus": Row("two ranks, NCCL", 0, Machine.two_gpus),
    "vit": Row("examples/vit, a few steps", 20, lambda m: m.example("vit")),
    "gpt": Row("examples/gpt, a few steps", 20, lambda m: m.example("gpt")),
}
MISSING = "not complete"


def parsed() -> argparse.Namespace:
    """Parses the command line."""
    alone = sum(row.seconds for row in ROWS.values() if row.is_alone)
    others = [row.seconds for row in ROWS.values() if not row.is_alone]
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description="What only a GPU shows. Rows, with seconds on an H100 with 16 cores:\n"
        + "\n".join(f"  {name:16} {row.what} ({row.seconds} s)" for name, row in ROWS.items())
        + f"\nTogether {alone + max(others)} s: the rows after `large` run beside each other.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="only these, in the list's order")
    parser.add_argument("--write", action="store_true", help="put each row into RESULTS.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="another file for --write")
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    parser.add_argument("--dataset", default="mnist", choices=["mnist", "digits"])
    parser.add_argument("--max-steps", type=int, help="shorter trainings, for a rehearsal")
    options = parser.parse_args()
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    return options


def measured(row: Row, machine: Machine) -> tuple[str, float]:
    """Returns the last cell of a row, and its seconds."""
    began = time.monotonic()
    try:
        told = row.work(machine)
    except (Exception, SystemExit) as error:  # the next row may pass
        print(f"== {row.what} failed:\n{error}", file=sys.stderr, flush=True)
        told = f"FAILED: {(str(error).splitlines() or [repr(error)])[0]:.100}"
    return told, time.monotonic() - began


def check(chosen: list[Row], machine: Machine, table: Section) -> bool:
    """Measures the rows; returns whether none failed."""
    passed = True

    def put(row: Row, told: str, seconds: float) -> None:
        nonlocal passed
        passed &= not told.startswith("FAILED")
        line = f"| {row.what} | {seconds:.0f} | {told} |"
        table.put(HEADER, line)
        print(line, flush=True)

    for row in ROWS.values():
        if row in chosen or not table.has(HEADER, row.what):
            table.put(HEADER, f"| {row.what} | | {MISSING} |")
    for row in chosen:
        if row.is_alone:
            put(row, *measured(row, machine))
    with ThreadPoolExecutor(BESIDE) as pool:
        others = [row for row in chosen if not row.is_alone]
        futures = {pool.submit(measured, row, machine): row for row in others}
        for future in as_completed(futures):
            put(futures[future], *future.result())
    return passed


def main() -> int:
    options = parsed()
    try:
        caption, gpus = json.loads(run("-c", DESCRIBE).splitlines()[-1])
    except RuntimeError as error:
        print(f"gpu_check: {str(error).splitlines()[-1]}", file=sys.stderr)
        return 2
    path = options.results if options.write else None
    keeps = bool(options.rows)
    chosen = [ROWS[name] for name in ROWS if name in (options.rows or ROWS)]
    heading = f"## Training steps{steps.BY_BATCH.format('GPU')}\n\n{caption}. Rounds of "
    heading += f"{options.max_steps or 600} steps, the first sixth not timed; bf16-mixed"
    heading += f"{steps.FEWER}.\n"
    headers = (steps.BATCH_HEADER, steps.PROFILE_HEADER)
    speeds = Section("steps-gpu", f"{heading}{steps.CONTENTS}".strip(), headers, path, keeps)
    heading = f"## The check of a GPU\n\n{caption}; {gpus} GPU(s)."
    table = Section("gpu-check", heading, [HEADER], path, keeps)
    with tempfile.TemporaryDirectory() as folder:
        passed = check(chosen, Machine(options, gpus, Path(folder), speeds), table)
    print(f"\n{speeds}\n\n{table}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
