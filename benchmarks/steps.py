"""Training steps per second of model_pretrain.py and of the files in ladder/, on one machine.

    python benchmarks/steps.py --data-dir PATH [--rounds N] [--threads 1 2] [--write]
    python benchmarks/steps.py --device gpu --batches 128 1024 8192 65536 [--profile] [--write]

Each training is a process of its own (`peer.py`). The programs take turns, so a machine that slows
down slows all of them, and a ratio is taken within a round. Each program is compared with the
number of threads that is best for it; by micro batch, with the first one given. Before that, the
losses of the first steps are compared: the data, the weights and the mathematics are the same.
`--profile` adds the kernels, synchronizations and copies per step, as torch's profiler counts them.
`--write` puts the table into RESULTS.md, where each version of Python has a section, and so have
the tables by micro batch of a CPU and of a GPU.
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

from report import DATA_DIR, HEADER, Row, machine, short, write_section

HERE = Path(__file__).resolve().parent
TITLES = {
    "ours": "model_pretrain.py",
    "stock": "model_pretrain.py with MEGAKIT_STOCK=1",
    "1_torch_by_hand": "plain PyTorch, by hand",
    "fused_by_hand": "plain PyTorch with the fused AdamW, by hand",
    "2_lightning_by_hand": "plain Lightning, by hand",
    "1_torch": "plain PyTorch (1_torch.py)",
    "fused": "plain PyTorch with the fused AdamW (1_torch.py)",
    "2_lightning": "plain Lightning (2_lightning.py)",
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
PROOF_STEPS = 50
#: The only micro batch of 4_nemo.py, which reads sample by sample as NeMo's tutorials do.
MICRO_BATCH = 128
#: Steps with the profiler, and the steps before them.
PROFILED_STEPS, PROFILED_WARM_UP = 100, 20

Told = dict[str, Any]
#: By the peer and the number of its threads, one for each round.
Measured = dict[tuple[str, int], list[Told]]


def train(peer: str, threads: int, device: str = "cpu", **job: Any) -> Told:
    """Returns what a training tells; `job` is as in `peer.Job`."""
    options = [str(HERE / "peer.py"), "ours" if peer == "stock" else peer]
    for name, value in job.items():
        options += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    with tempfile.TemporaryDirectory() as folder:
        changes = {"OMP_NUM_THREADS": str(threads), "TMPDIR": folder}
        if peer == "stock":  # without the patches that save time
            changes["MEGAKIT_STOCK"] = "1"
        if device == "cpu":
            changes["CUDA_VISIBLE_DEVICES"] = ""
        done = subprocess.run(
            [sys.executable, *options],
            env={**os.environ, **changes},
            capture_output=True,
            text=True,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != 1:
        sys.exit(f"{' '.join(options)} failed:\n{done.stderr[-4000:]}")
    told: Told = json.loads(lines[0])
    return told


def difference(losses: dict[str, float], ours: dict[str, float]) -> float:
    """Returns the largest relative difference at the steps that both tell."""
    return max(abs(loss / losses[step] - 1) for step, loss in ours.items())


def same_mathematics(peers: list[str], **job: Any) -> dict[tuple[str, str], float]:
    """Returns the largest difference of each peer's losses from ours, by peer and precision."""
    found = {}
    for precision in ("32", "bf16-mixed"):
        common = {**job, "steps": PROOF_STEPS, "warm_up": 1, "precision": precision}
        losses = {peer: train(peer, 1, **common)["losses"] for peer in ("ours", *peers)}
        for peer in peers:
            found[peer, precision] = difference(losses[peer], losses["ours"])
    return found


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


def batch_table(measured: dict[int, Measured]) -> list[str]:
    """Lists each peer at each micro batch, and its share of the plain ones."""
    lines = ["| micro batch | what | step/s | samples/s | of plain PyTorch | of plain Lightning |"]
    lines.append("|---|---|---|---|---|---|")
    for batch, of_batch in measured.items():
        rates = {
            peer: [one["steps_per_second"] for one in values]
            for (peer, _), values in of_batch.items()
        }
        for peer, own in rates.items():
            rate = statistics.median(own)
            shares = [share(own, rates.get(other, [])) for other in ("1_torch", "2_lightning")]
            cells = [f"{batch:,}", TITLES[peer], short(rate), short(rate * batch), *shares]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def share(own: list[float], other: list[float]) -> str:
    """Returns the median of a peer's share of another one within a round; lowest to highest."""
    if not other or own is other:
        return ""
    shares = [a / b for a, b in zip(own, other, strict=True)]
    return f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"


def profile_table(peers: list[str], **job: Any) -> list[str]:
    """Lists the kernels, synchronizations and copies per step, as torch's profiler counts them."""
    kinds = ("kernels", "synchronizations", "copies", "cudaMemcpyAsync")
    lines = [f"| mean per step | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    job |= {"steps": PROFILED_WARM_UP + PROFILED_STEPS, "warm_up": PROFILED_WARM_UP}
    for peer in peers:
        # Without an entry, torch's profiler sees no GPU.
        seen = train(peer, 1, **job, precision="bf16-mixed", profile=True).get("profile", {})
        calls = [f"{seen[kind]:.2f}" if kind in seen else "not seen" for kind in kinds]
        lines.append(f"| {TITLES[peer]} | {' | '.join(calls)} |")
    return lines


def measure(options: argparse.Namespace, batch: int, job: dict[str, Any]) -> Measured:
    """Trains the rounds of a micro batch; where a step is long, few steps tell enough."""
    steps = max(min(60, options.steps), min(options.steps, options.steps * 2048 // batch))
    job = {**job, "precision": "bf16-mixed", "batch_size": batch}
    job |= {"steps": steps, "warm_up": max(1, steps // 6)}
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
    parser = argparse.ArgumentParser(description="Training steps per second, side by side.")
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    parser.add_argument("--dataset", default="mnist", choices=["mnist", "digits"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--batches", type=int, nargs="+", default=[MICRO_BATCH], metavar="SIZE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="NUMBER")
    parser.add_argument(
        "--peers", nargs="+", choices=TITLES, default=[*TITLES], help="by default all"
    )
    parser.add_argument("--no-proof", action="store_true", help="do not compare losses first")
    parser.add_argument(
        "--profile", action="store_true", help="count kernels, synchronizations and copies"
    )
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    options.by_batch = options.device == "gpu" or options.batches != [MICRO_BATCH]
    if options.by_batch:
        options.threads = options.threads[:1]
    if options.profile and options.device != "gpu":
        parser.error("--profile needs --device gpu: a CPU has no such calls")
    return options


def main() -> None:
    options = parsed()
    caption = machine("lightning", "nemo_toolkit", "megatron-core", device=options.device)
    caption += f" {options.rounds} rounds of {options.steps} steps, the first sixth not timed"
    data_dir = options.data_dir.absolute()
    job = {"data_dir": data_dir, "dataset": options.dataset, "device": options.device}
    lines = []
    if not options.no_proof:
        others = [peer for peer in options.peers if peer != "ours"]
        lines = proof_lines(same_mathematics(others, **job))
        print("\n".join(lines), flush=True)
    measured = {batch: measure(options, batch, job) for batch in options.batches}
    python = "{}.{}".format(*sys.version_info)
    section, what = f"steps-{python}", f", micro batch 128, bf16-mixed, Python {python}"
    table = []
    if options.by_batch:
        section = f"steps-{options.device}"
        what = f" on a {options.device.upper()}, by micro batch, bf16-mixed"
        caption += "; fewer steps where the micro batch is above 2,048"
        table = batch_table(measured)
    elif "ours" in options.peers:
        table = [*HEADER, *map(str, rows_of(measured[MICRO_BATCH]))]
    if options.profile:
        table += ["", *profile_table(options.peers, **job, batch_size=options.batches[0])]
    heading = f"## Training steps{what}\n\n{caption}.\n{CONTENTS}"
    text = "\n".join([heading, *table, "", *lines])
    print(text)
    if options.write:
        write_section(section, text)


if __name__ == "__main__":
    main()
