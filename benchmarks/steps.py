"""Training steps per second: ours, plain Lightning, plain PyTorch, the published way; one machine.

    python benchmarks/steps.py --data-dir PATH [--rounds N] [--threads 1 2] [--write]

Micro batch 128, data in, validation and saves out, each in a process of its own and in turn, so
that a machine that slows down slows all of them. A ratio is taken within a round. Before that, the
losses of the first steps are compared: the same data, weights and mathematics. `--write` puts the
table into RESULTS.md.
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

from report import HEADER, REPOSITORY, Row, machine, write_section

HERE = Path(__file__).resolve().parent
PEERS = ("ours", "lightning", "torch")
TITLES = {
    "ours": "model_pretrain.py",
    "lightning": "plain Lightning",
    "torch": "plain PyTorch",
    "published": "the published tutorial's way",
}
PROOF_STEPS = 50
#: The published way is slow, and saves when it ends an epoch of 429 steps.
PUBLISHED_STEPS, PUBLISHED_WARM_UP = 250, 50

Told = dict[str, Any]


def told_by(command: list[str], threads: int) -> Told:
    """What a process tells in the one line of JSON that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = f"{REPOSITORY}:{HERE}"
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
    options = []
    for name, value in job.items():
        options.append(f"--{name.replace('_', '-')}")
        if value is not True:
            options.append(str(value))
    return told_by([str(HERE / "peer.py"), peer, *options], threads)


def train_published(threads: int, data_dir: Path) -> Told:
    """The published way, without its saves and validation."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--data-dir", str(data_dir), "--folder", folder]
        options += ["--steps", str(PUBLISHED_STEPS), "--interval", str(PUBLISHED_STEPS)]
        told = told_by([str(HERE / "peers" / "published.py"), "pretrain", *options], threads)
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
        f"{TITLES[peer]}: the losses of the first {PROOF_STEPS} steps differ from ours by at most "
        f"{differences[peer, '32']:.1e} (relative) in float32, "
        f"{differences[peer, 'bf16-mixed']:.1e} in bf16-mixed."
        for peer, precision in differences
        if precision == "32"
    ]


def rows_of(measured: dict[tuple[str, int], list[Told]]) -> list[Row]:
    """The peers, each with the number of threads that is best for it, against ours."""
    rates = {key: [one["steps_per_second"] for one in values] for key, values in measured.items()}
    best: dict[str, int] = {}
    for peer, threads in sorted(rates, key=lambda key: statistics.median(rates[key])):
        best[peer] = threads
    rows = []
    for (peer, threads), values in rates.items():
        processor = [one["processor_ms_per_step"] for one in measured[peer, threads]]
        note = f"{statistics.median(processor):.2f} ms of processor time a step"
        if peer != "ours" and best[peer] == threads:
            ours = rates["ours", best["ours"]]
            ratios = [own / other for own, other in zip(ours, values, strict=True)]
            low, high = min(ratios), max(ratios)
            note += f"; ours is {statistics.median(ratios):.2f} of it ({low:.2f} to {high:.2f})"
        unit = "step/s" if best[peer] == threads else "step/s, not its best"
        rows.append(Row(f"{TITLES[peer]}, {threads} thread(s)", values, unit, note))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Training steps per second, side by side.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--peers", nargs="+", default=[*PEERS, "published"], choices=TITLES)
    parser.add_argument("--corruption", type=float, default=0.0, help="share of pixels dropped")
    parser.add_argument("--no-proof", action="store_true", help="do not compare losses first")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    job = {"data_dir": options.data_dir, "corruption": options.corruption}
    lines = []
    if not options.no_proof:
        others = [peer for peer in options.peers if peer in PEERS and peer != "ours"]
        lines = proof_lines(same_mathematics(others, **job))
        print("\n".join(lines), flush=True)
    measured: dict[tuple[str, int], list[Told]] = {}
    for number in range(options.rounds):
        for peer in options.peers:
            for threads in options.threads:
                if peer == "published":
                    told = train_published(threads, options.data_dir)
                else:
                    told = train(peer, threads, steps=options.steps, **job)
                measured.setdefault((peer, threads), []).append(told)
        now = ", ".join(
            f"{peer} {values[-1]['steps_per_second']:.0f}" for (peer, _), values in measured.items()
        )
        print(f"round {number + 1}: {now}", file=sys.stderr, flush=True)
    title = "## Training steps, micro batch 128, bf16-mixed"
    caption = machine("lightning", "nemo_toolkit", "megatron-core")
    caption += f" {options.rounds} rounds of {options.steps} steps, the first 100 not timed."
    table = [*HEADER, *map(str, rows_of(measured))] if "ours" in options.peers else []
    text = "\n".join([title, "", caption, "", *table, "", *lines])
    print(text)
    if options.write:
        write_section("steps", text)


if __name__ == "__main__":
    main()
