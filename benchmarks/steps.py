"""Training steps per second of model_pretrain.py and of the files in ladder/, on one machine.

    python benchmarks/steps.py --data-dir PATH [--rounds N] [--threads 1 2] [--write]
    python benchmarks/steps.py --device gpu --batches 128 1024 8192 65536 [--profile] [--write]

Each training is a process of its own (`peer.py`). The programs take turns, so a machine that slows
down slows all of them, and a ratio is taken within a round. Each program is compared with the
number of threads that is best for it; by micro batch, with the first one given. Before that, the
losses of the first steps are compared: the data, the weights and the mathematics are the same.
On a GPU, model_pretrain.py is also measured with its default corruption, and with a CUDA graph.
`--profile` adds the kernels, synchronizations and copies per step, as torch's profiler counts them.
A CPU without instructions for bfloat16 computes in float32, as the tutorial does there.
`--write` puts the table into RESULTS.md, where a CPU and a GPU have a section each, and a table of
chosen programs (`--peers`) has its own.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from report import HEADER, Row, machine, parser_of, short, table, write_section

from megakit.runtime.accelerator import has_fast_bfloat16
from model_pretrain import PretrainOptions

HERE = Path(__file__).resolve().parent
TITLES = {
    "ours": "model_pretrain.py",
    "ours_graph": "model_pretrain.py with a CUDA graph",
    "ours_corrupted": "model_pretrain.py, pixels corrupted",
    "ours_graph_corrupted": "model_pretrain.py with a CUDA graph, pixels corrupted",
    "stock": "model_pretrain.py with MEGAKIT_STOCK=1",
    "1_torch_by_hand": "plain PyTorch, by hand",
    "fused_by_hand": "plain PyTorch with the fused AdamW, by hand",
    "2_lightning_by_hand": "plain Lightning, by hand",
    "1_torch": "plain PyTorch (1_torch.py)",
    "fused": "plain PyTorch with the fused AdamW (1_torch.py)",
    "fused_graph": "plain PyTorch with the fused AdamW, the model in CUDA graphs (1_torch.py)",
    "2_lightning": "plain Lightning (2_lightning.py)",
    "alone": "Megatron-Core alone (examples/megatron)",
    "alone_short": "examples/megatron by the schedule of model_pretrain.py",
    "alone_newest": "examples/megatron with the newest Megatron-Core",
    "3_megatron": "Megatron-Core alone (3_megatron.py)",
    "4_nemo": "NeMo 2 alone, sample by sample (4_nemo.py)",
}
#: What a reader of the table has to know about the programs.
CONTENTS = """
"By hand" is a program of ladder/ as one writes it without this project: all images are in one
tensor of bytes on the device, and the order of the samples is computed before the first step. The
other programs of ladder/ read through mnist/samples.py. 3_megatron.py and 4_nemo.py print the loss
of each step. 4_nemo.py trains as NeMo's tutorials do, with NeMo's MegatronStrategy: the DataLoader
reads and collates single samples in the training's process, seven values are logged at each step,
and TensorBoard writes them at every 50th. No program saves a checkpoint while it is timed.
"""
#: What a GPU alone can do, or only a GPU makes worth a row.
GPU_PEERS = {"ours_graph", "ours_corrupted", "ours_graph_corrupted", "fused_graph"}
BY_BATCH = " on a {}, by micro batch"
FEWER = "; fewer steps where the micro batch is above 2,048"
#: The environment of ladder/newest.sh, with a later Megatron-Core and without NeMo.
NEWEST = HERE.parent / "build/venv-newest/bin/python"
PROOF_STEPS = 50
#: The only micro batch of 4_nemo.py, which reads sample by sample as NeMo's tutorials do.
MICRO_BATCH = 128
#: Steps with the profiler, and the steps before them.
PROFILED_STEPS, PROFILED_WARM_UP = 100, 20
PROFILED = (
    *("kernels", "graphs", "synchronizations", "copies", "bytes copied", "cudaMemcpyAsync"),
    "GPU ms",
)
PROFILE_HEADER = f"| mean per step | {' | '.join(PROFILED)} |"
BATCH_HEADER = (
    "| what | step/s | samples/s | of plain PyTorch | of the fused AdamW | of plain Lightning "
    "| rounds |"
)

Key = TypeVar("Key")
Told = dict[str, Any]
#: By the peer and the number of its threads, one for each round.
Measured = dict[tuple[str, int], list[Told]]


class Training:
    """A peer's process, which imports what it needs, and then waits for `result`.

    Args:
        peer: A name in `TITLES`.
        threads: The number of its threads.
        device: `cpu` or `gpu`.
        job: As in `peer.Job`.
    """

    def __init__(self, peer: str, threads: int, device: str = "cpu", **job: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()
        changes = {"OMP_NUM_THREADS": str(threads), "TMPDIR": self.folder.name}
        if peer == "stock":  # without the patches that save time
            peer, changes["MEGAKIT_STOCK"] = "ours", "1"
        python = sys.executable
        if peer == "alone_newest":
            peer, python = "alone", str(NEWEST)
        if peer.endswith("_corrupted"):
            peer, job["corruption"] = peer.removesuffix("_corrupted"), PretrainOptions.corruption
        if device == "cpu":
            changes["CUDA_VISIBLE_DEVICES"] = ""
        self.options = [str(HERE / "peer.py"), peer, "--waits"]
        for name, value in job.items():
            self.options += [f"--{name.replace('_', '-')}"]
            self.options += [] if value is True else [str(value)]
        self.errors = Path(self.folder.name, "errors")  # a pipe that nobody reads may be full
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [python, *self.options],
                env={**os.environ, **changes},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def wait_until_ready(self) -> None:
        """Waits until the process waits, or has failed."""
        assert self.process.stdout is not None
        while self.process.stdout.readline() not in ("ready\n", ""):
            pass

    def result(self) -> Told:
        """Lets the process train, and returns what it tells."""
        out, _ = self.process.communicate("go\n")
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if self.process.returncode or len(lines) != 1:
            told = self.errors.read_text()[-4000:]
            sys.exit(f"{' '.join(self.options)} failed:\n{told}")
        result: Told = json.loads(lines[0])
        return result

    def close(self) -> None:
        """Ends a process that still waits, and removes its files."""
        if self.process.returncode is None:
            self.process.communicate()
        self.folder.cleanup()


def train(peer: str, threads: int, device: str = "cpu", **job: Any) -> Told:
    """Returns what a training tells."""
    with contextlib.closing(Training(peer, threads, device, **job)) as training:
        return training.result()


def in_turns(jobs: dict[Key, dict[str, Any]], ahead: int = 1) -> Iterator[tuple[Key, Training]]:
    """Yields trainings one after the other; so many at a time import what they need together."""
    waiting = list(jobs.items())
    while now := waiting[:ahead]:
        del waiting[:ahead]
        with contextlib.ExitStack() as stack:
            started = {key: Training(**job) for key, job in now}
            for training in started.values():
                stack.callback(training.close)
            for training in started.values():
                training.wait_until_ready()
            yield from started.items()


def difference(losses: dict[str, float], ours: dict[str, float]) -> float:
    """Returns the largest relative difference at the steps that both tell."""
    return max(abs(loss / losses[step] - 1) for step, loss in ours.items())


def same_mathematics(peers: list[str], ahead: int = 1, **job: Any) -> dict[tuple[str, str], float]:
    """Returns the largest difference of each peer's losses from ours, by peer and precision."""
    job |= {"threads": 1, "steps": PROOF_STEPS, "warm_up": 1}
    jobs = {
        (peer, precision): {**job, "peer": peer, "precision": precision}
        for precision in ("32", "bf16-mixed")
        for peer in ("ours", *peers)
    }
    losses = {key: training.result()["losses"] for key, training in in_turns(jobs, ahead)}
    return {
        (peer, precision): difference(losses[peer, precision], losses["ours", precision])
        for peer, precision in losses
        if peer != "ours"
    }


def proof_lines(differences: dict[tuple[str, str], float]) -> list[str]:
    """Says what `same_mathematics` found: a sentence for each peer."""
    return [
        f"{TITLES[peer]}: the losses of the first {PROOF_STEPS} steps (the first and every tenth) "
        f"differ from those of {TITLES['ours']} by at most "
        f"{differences[peer, '32']:.1e} (relative) in float32, "
        f"{differences[peer, 'bf16-mixed']:.1e} in bf16-mixed."
        for peer, precision in differences
        if precision == "32"
    ]


def rows_of(measured: Measured) -> list[Row]:
    """Compares the peers with ours, each with the number of threads that is best for it."""
    rates = {key: [one["steps_per_second"] for one in values] for key, values in measured.items()}
    by_rate = sorted(rates, key=lambda key: statistics.median(rates[key]))
    best = {peer: rates[peer, threads] for peer, threads in by_rate}
    rows = []
    for (peer, threads), values in rates.items():
        if values is not best[peer]:
            continue
        busy = statistics.median(one["processor_ms_per_step"] for one in measured[peer, threads])
        note = f"{threads} thread(s), {busy:.2f} ms of processor time per step"
        if peer != "ours":
            note += f"; {TITLES['ours']} has {share(best['ours'], values)} of these steps/s"
        rows.append(Row(TITLES[peer], values, "step/s", note))
    return rows


def batch_rows(batch: int, measured: Measured) -> list[str]:
    """Lists each peer at a micro batch, and its share of the plain ones."""
    rates = {
        peer: [one["steps_per_second"] for one in values] for (peer, _), values in measured.items()
    }
    rows = []
    for peer, own in rates.items():
        rate = statistics.median(own)
        plain = [] if "corrupted" in peer else ["1_torch", "fused", "2_lightning"]
        shares = [share(own, rates.get(other, [])) for other in plain] or [""] * 3
        cells = [f"{TITLES[peer]}, micro batch {batch:,}", short(rate), short(rate * batch)]
        rows.append(f"| {' | '.join([*cells, *shares, str(len(own))])} |")
    return rows


def share(own: list[float], other: list[float]) -> str:
    """Returns the median of a peer's share of another one within a round; lowest to highest."""
    if not other or own is other:
        return ""
    shares = [a / b for a, b in zip(own, other, strict=False)]  # a round may not be complete
    return f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"


def profile_job(peer: str, **job: Any) -> dict[str, Any]:
    """Returns the arguments of a training that is profiled."""
    steps = {"steps": PROFILED_WARM_UP + PROFILED_STEPS, "warm_up": PROFILED_WARM_UP}
    return {"peer": peer, "threads": 1, **steps, **job, "precision": "bf16-mixed", "profile": True}


def profile_row(peer: str, told: Told) -> str:
    """Tells the kernels, synchronizations and copies per step, as torch's profiler counts them."""
    seen = told.get("profile", {})  # none where torch's profiler sees no GPU
    cells = [short(seen[kind]) if kind in seen else "not seen" for kind in PROFILED]
    return f"| {TITLES[peer]} | {' | '.join(cells)} |"


def job_of(batch: int, steps: int, **job: Any) -> dict[str, Any]:
    """Returns the arguments of a timed training; where a step is long, few steps tell enough."""
    steps = max(min(60, steps), min(steps, steps * 2048 // batch))
    job = {"precision": "bf16-mixed", "batch_size": batch} | job
    return {**job, "steps": steps, "warm_up": max(1, steps // 6)}


def measure(options: argparse.Namespace, batch: int, job: dict[str, Any]) -> Measured:
    """Trains the rounds of a micro batch."""
    job = job_of(batch, options.steps, precision=options.precision, **job)
    peers = [peer for peer in options.peers if peer != "4_nemo" or batch == MICRO_BATCH]
    measured: Measured = {}
    for number in range(options.rounds):
        for peer in peers:
            for threads in options.threads:
                told = train(peer, threads, **job)
                measured.setdefault((peer, threads), []).append(told)
        now = ", ".join(
            f"{peer}/{threads} {values[-1]['steps_per_second']:.0f}"
            for (peer, threads), values in measured.items()
        )
        print(f"batch {batch}, round {number + 1}: {now}", file=sys.stderr, flush=True)
    return measured


def parsed() -> argparse.Namespace:
    """Parses the command line."""
    parser = parser_of("Training steps per second, side by side.")
    parser.add_argument("--dataset", default="mnist", choices=["mnist", "digits"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--batches", type=int, nargs="+", default=[MICRO_BATCH], metavar="SIZE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="NUMBER")
    parser.add_argument(
        "--peers", nargs="+", choices=TITLES, help="by default all that suit the device"
    )
    parser.add_argument("--no-proof", action="store_true", help="do not compare losses first")
    parser.add_argument(
        "--profile", action="store_true", help="count kernels, synchronizations and copies"
    )
    options = parser.parse_args()
    options.are_chosen = bool(options.peers)
    options.peers = options.peers or [
        peer
        for peer in TITLES
        if (options.device == "gpu" or peer not in GPU_PEERS)
        and (peer != "alone_newest" or NEWEST.is_file())
    ]
    options.by_batch = options.device == "gpu" or options.batches != [MICRO_BATCH]
    if options.by_batch:
        options.threads = options.threads[:1]
    is_fast = options.device == "gpu" or has_fast_bfloat16()
    options.precision = "bf16-mixed" if is_fast else "32"
    if options.profile and options.device != "gpu":
        parser.error("--profile needs --device gpu: a CPU has no such calls")
    return options


def main() -> None:
    options = parsed()
    caption = machine("lightning", "nemo_toolkit", "megatron-core", device=options.device)
    caption += f" {options.rounds} rounds of {options.steps} steps, the first sixth not timed"
    caption += f"; {options.precision.replace('32', 'float32')}"
    data_dir = options.data_dir.absolute()
    job = {"data_dir": data_dir, "dataset": options.dataset, "device": options.device}
    lines = []
    if not options.no_proof:
        others = [p for p in options.peers if p != "ours" and not p.endswith("_corrupted")]
        lines = proof_lines(same_mathematics(others, **job))
        print("\n".join(lines), flush=True)
    measured = {batch: measure(options, batch, job) for batch in options.batches}
    section = f"steps-{options.device}{'-chosen' * options.are_chosen}"
    what = f" on a CPU, micro batch {MICRO_BATCH}{', of chosen programs' * options.are_chosen}"
    tables = []
    if options.by_batch:
        section += "-by-batch" * (options.device == "cpu")
        what = BY_BATCH.format(options.device.upper())
        caption += FEWER
        rows = [row for batch, found in measured.items() for row in batch_rows(batch, found)]
        tables = table(BATCH_HEADER, rows)
    elif "ours" in options.peers:
        tables = [*HEADER, *map(str, rows_of(measured[MICRO_BATCH]))]
    if options.profile:
        jobs = {
            peer: profile_job(peer, **job, batch_size=options.batches[0]) for peer in options.peers
        }
        rows = [profile_row(peer, training.result()) for peer, training in in_turns(jobs)]
        tables += ["", *table(PROFILE_HEADER, rows)]
    heading = f"## Training steps{what}\n\n{caption}.\n{CONTENTS}"
    text = "\n".join([heading, *tables, "", *lines])
    print(text)
    if options.write:
        write_section(section, text)


if __name__ == "__main__":
    main()
