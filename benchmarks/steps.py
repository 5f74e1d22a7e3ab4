"""Training steps per second: ours, plain Lightning, plain PyTorch, the published way; one machine.

    python benchmarks/steps.py --data-dir PATH [--rounds N] [--threads 1 2] [--write]
    python benchmarks/steps.py --device gpu --batches 128 1024 8192 65536 [--profile] [--write]

Data in, validation and saves out, each in a process of its own and in turn, so that a machine that
slows down slows all of them. A ratio is taken within a round. Before that, the losses of the first
steps are compared: the same data, weights and mathematics. `--profile` adds the kernels,
synchronizations and copies per step, as torch's profiler counts them.
`--write` puts the table into RESULTS.md; a table by micro batch has a section of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import HEADER, REPOSITORY, Row, machine, short, write_section

HERE = Path(__file__).resolve().parent
PEERS = ("ours", "lightning", "torch", "torch-fused")
TITLES = {
    "ours": "model_pretrain.py",
    "lightning": "plain Lightning",
    "torch": "plain PyTorch",
    "torch-fused": "plain PyTorch with the fused AdamW",
    "published": "the published tutorial's way",
}
PROOF_STEPS = 50
#: The micro batch of the scripts' tests; the published way is measured at no other.
MICRO_BATCH = 128
#: Steps with the profiler, and the steps before them.
PROFILED_STEPS, PROFILED_WARM_UP = 100, 20
#: The published way is slow, and saves when it ends an epoch of 429 steps.
PUBLISHED_STEPS, PUBLISHED_WARM_UP = 250, 50

Told = dict[str, Any]
#: By the peer and the number of its threads, one for each round.
Measured = dict[tuple[str, int], list[Told]]


def told_by(command: list[str], threads: int, **changes: str) -> Told:
    """What a process tells in the one line of JSON that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **changes}
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    environment["PYTHONPATH"] = ":".join([str(REPOSITORY), str(HERE), *inherited])
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != 1:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    told: Told = json.loads(lines[0])
    return told


def train(peer: str, threads: int, **job: Any) -> Told:
    """One training by ours, plain Lightning or plain PyTorch; `job` is as in `peers.job.Job`."""
    if peer == "torch-fused":
        return train("torch", threads, **job, optimizer="fused")
    options = []
    for name, value in job.items():
        options.append(f"--{name.replace('_', '-')}")
        if value is not True:
            options.append(str(value))
    changes = {} if job.get("device") == "gpu" else {"CUDA_VISIBLE_DEVICES": ""}
    return told_by([str(HERE / "peer.py"), peer, *options], threads, **changes)


def train_published(threads: int, data_dir: Path) -> Told:
    """The published way, without its saves and validation."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--data-dir", str(data_dir), "--folder", folder]
        options += ["--steps", str(PUBLISHED_STEPS), "--interval", str(PUBLISHED_STEPS)]
        command = [str(HERE / "peers" / "published.py"), "pretrain", *options]
        told = told_by(command, threads, CUDA_VISIBLE_DEVICES="")
    ends = told["ends"][PUBLISHED_WARM_UP - 1 :]
    told["steps_per_second"] = (len(ends) - 1) / (ends[-1] - ends[0])
    processor = told["processor"][PUBLISHED_WARM_UP - 1 :]
    told["processor_ms_per_step"] = 1000 * (processor[-1] - processor[0]) / (len(ends) - 1)
    return told


def difference(losses: list[float], ours: list[float]) -> float:
    """The largest relative one, over all steps."""
    return max(abs(a - b) / b for a, b in zip(losses, ours, strict=True))


def same_mathematics(peers: list[str], **job: Any) -> dict[tuple[str, str], float]:
    """Largest relative difference of each peer's losses to ours, by peer and precision."""
    found = {}
    for precision in ("32", "bf16-mixed"):
        common = {**job, "steps": PROOF_STEPS, "warm_up": 1, "precision": precision}
        losses = {
            peer: train(peer, 1, **common, every_loss=True)["losses"] for peer in ("ours", *peers)
        }
        for peer in peers:
            found[peer, precision] = difference(losses[peer], losses["ours"])
    return found


def proof_lines(differences: dict[tuple[str, str], float]) -> list[str]:
    """What same_mathematics found, in a sentence for each peer."""
    return [
        f"{TITLES[peer]}: the losses of the first {PROOF_STEPS} steps differ from those of "
        f"{TITLES['ours']} by at most "
        f"{differences[peer, '32']:.1e} (relative) in float32, "
        f"{differences[peer, 'bf16-mixed']:.1e} in bf16-mixed."
        for peer, precision in differences
        if precision == "32"
    ]


def rows_of(measured: Measured) -> list[Row]:
    """The peers, each with the number of threads that is best for it, against ours."""
    rates = {key: [one["steps_per_second"] for one in values] for key, values in measured.items()}
    best: dict[str, int] = {}
    for peer, threads in sorted(rates, key=lambda key: statistics.median(rates[key])):
        best[peer] = threads
    rows = []
    for (peer, threads), values in rates.items():
        processor = [one["processor_ms_per_step"] for one in measured[peer, threads]]
        note = f"{statistics.median(processor):.2f} ms of processor time per step"
        if peer != "ours" and best[peer] == threads:
            ours = rates["ours", best["ours"]]
            ratios = [own / other for own, other in zip(ours, values, strict=True)]
            low, high = min(ratios), max(ratios)
            ratio = f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
            note += f"; {TITLES['ours']} has {ratio} of these steps/s"
        unit = "step/s" if best[peer] == threads else "step/s, not its best"
        rows.append(Row(f"{TITLES[peer]}, {threads} thread(s)", values, unit, note))
    return rows


def batch_table(measured: dict[int, Measured]) -> list[str]:
    """Each peer at each micro batch, and its share of the plain ones."""
    lines = ["| micro batch | what | step/s | samples/s | of plain PyTorch | of plain Lightning |"]
    lines.append("|---|---|---|---|---|---|")
    for batch, of_batch in measured.items():
        rates = {
            peer: [one["steps_per_second"] for one in values]
            for (peer, _), values in of_batch.items()
        }
        for peer, own in rates.items():
            rate = statistics.median(own)
            shares = [share(own, rates.get(other, [])) for other in ("torch", "lightning")]
            cells = [f"{batch:,}", TITLES[peer], short(rate), short(rate * batch), *shares]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def share(own: list[float], other: list[float]) -> str:
    """The median of a peer's share of another one, taken within a round; lowest to highest."""
    if not other or own is other:
        return ""
    shares = [a / b for a, b in zip(own, other, strict=True)]
    return f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"


def profile_table(peers: list[str], **job: Any) -> list[str]:
    """Kernels, synchronizations, copies to the GPU per step, as torch's profiler counts them."""
    kinds = ("kernels", "synchronizations", "copies", "cudaMemcpyAsync")
    lines = [f"| mean per step | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    steps = {"steps": PROFILED_WARM_UP + PROFILED_STEPS, "warm_up": PROFILED_WARM_UP}
    for peer in peers:
        # Without an entry, torch's profiler sees no GPU.
        seen = train(peer, 1, **job, **steps, profile=True).get("profile", {})
        calls = [f"{seen[kind]:.2f}" if kind in seen else "not seen" for kind in kinds]
        lines.append(f"| {TITLES[peer]} | {' | '.join(calls)} |")
    return lines


def measure(options: argparse.Namespace, batch: int, job: dict[str, Any]) -> Measured:
    """The rounds of a micro batch; where a step is long, few steps tell enough."""
    steps = max(min(60, options.steps), min(options.steps, options.steps * 2048 // batch))
    settings = {**job, "batch_size": batch, "steps": steps, "warm_up": max(1, steps // 6)}
    measured: Measured = {}
    for number in range(options.rounds):
        for peer in options.peers:
            for threads in options.threads:
                if peer == "published":
                    told = train_published(threads, options.data_dir)
                else:
                    told = train(peer, threads, **settings)
                measured.setdefault((peer, threads), []).append(told)
        now = ", ".join(
            f"{peer} {values[-1]['steps_per_second']:.0f}" for (peer, _), values in measured.items()
        )
        print(f"batch {batch}, round {number + 1}: {now}", file=sys.stderr, flush=True)
    return measured


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Training steps per second, side by side.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--dataset", default="mnist", choices=["mnist", "digits"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--batches", type=int, nargs="+", default=[MICRO_BATCH], metavar="SIZE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--peers", nargs="+", choices=TITLES, help="by default, all that there are")
    parser.add_argument("--no-proof", action="store_true", help="do not compare losses first")
    parser.add_argument(
        "--profile", action="store_true", help="count kernels, synchronizations and copies"
    )
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    options.by_batch = options.device == "gpu" or options.batches != [MICRO_BATCH]
    if options.peers is None:
        options.peers = [*PEERS, *([] if options.by_batch else ["published"])]
    if options.by_batch and ("published" in options.peers or len(options.threads) > 1):
        parser.error("--device gpu, or --batches, takes one number of --threads, and no published")
    if options.profile and options.device != "gpu":
        parser.error("--profile needs --device gpu: a CPU has no such calls")
    return options


def main() -> None:
    options = parsed()
    job = {"data_dir": options.data_dir, "dataset": options.dataset, "device": options.device}
    peers = [peer for peer in options.peers if peer in PEERS]
    lines = []
    if not options.no_proof:
        others = [peer for peer in peers if peer != "ours"]
        lines = proof_lines(same_mathematics(others, **job))
        print("\n".join(lines), flush=True)
    measured = {batch: measure(options, batch, job) for batch in options.batches}
    title = "## Training steps, micro batch 128, bf16-mixed"
    caption = machine("lightning", "nemo_toolkit", "megatron-core", device=options.device)
    caption += f" {options.rounds} rounds of {options.steps} steps, the first sixth not timed"
    table = []
    if options.by_batch:
        title = f"## Training steps on a {options.device.upper()}, by micro batch, bf16-mixed"
        caption += "; fewer steps where the micro batch is above 2,048"
        table = batch_table(measured)
    elif "ours" in options.peers:
        table = [*HEADER, *map(str, rows_of(measured[MICRO_BATCH]))]
    if options.profile:
        table += ["", *profile_table(peers, **job, batch_size=options.batches[0])]
    text = "\n".join([title, "", f"{caption}.", "", *table, "", *lines])
    print(text)
    if options.write:
        write_section(f"steps-{options.device}" if options.by_batch else "steps", text)


if __name__ == "__main__":
    main()
