"""The language model of examples/gpt: its loss, its minutes, and its speed beside plain PyTorch.

    python benchmarks/gpt.py [--rounds N] [--seeds 1 2 3] [--threads N] [--write]

Each training runs in a process of its own, ours and the plain one in turn, from the same weights
and samples; a ratio is taken within a round. Both use torch's scaled_dot_product_attention. Then
the script runs at its defaults with each seed. `--write` puts the tables into RESULTS.md.
"""

import argparse
import math
import statistics
import sys
import tempfile
from pathlib import Path

from report import HEADER, REPOSITORY, Row, machine, write_section
from steps import HERE, Told, difference, told_by
from times import run

TITLES = {"ours": "examples/gpt/model_pretrain.py", "torch": "plain PyTorch"}
PRECISIONS = ("32", "bf16-mixed")
PROOF_STEPS = 20


def train(peer: str, options: argparse.Namespace, **job: object) -> Told:
    """One training; `job` is as in `gpt_peer.GptJob`."""
    command = [str(HERE / "gpt_peer.py"), peer, "--device", options.device]
    for name, value in job.items():
        command.append(f"--{name.replace('_', '-')}")
        command += [] if value is True else [str(value)]
    changes = {} if options.device == "gpu" else {"CUDA_VISIBLE_DEVICES": ""}
    return told_by(command, options.threads, **changes)


def same_mathematics(options: argparse.Namespace) -> list[str]:
    """What the first losses tell, in a sentence for each precision."""
    lines = []
    for precision in PRECISIONS:
        job = {"steps": PROOF_STEPS, "warm_up": 1, "precision": precision, "every_loss": True}
        ours, plain = (train(peer, options, **job)["losses"] for peer in TITLES)
        lines.append(
            f"The losses of the first {PROOF_STEPS} steps differ from plain PyTorch's by at most "
            f"{difference(plain, ours):.1e} (relative) in precision {precision}."
        )
    return lines


def speed_rows(options: argparse.Namespace) -> list[Row]:
    """Steps per second of both, and the validation losses after these steps."""
    rows = []
    for precision in PRECISIONS:
        told: dict[str, list[Told]] = {peer: [] for peer in TITLES}
        for number in range(options.rounds):
            for peer in TITLES:
                told[peer].append(train(peer, options, steps=options.steps, precision=precision))
            now = ", ".join(
                f"{peer} {found[-1]['steps_per_second']:.2f}" for peer, found in told.items()
            )
            print(f"{precision}, round {number + 1}: {now}", file=sys.stderr, flush=True)
        rates = {peer: [one["steps_per_second"] for one in found] for peer, found in told.items()}
        shares = [a / b for a, b in zip(rates["ours"], rates["torch"], strict=True)]
        share = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
        for peer, values in rates.items():
            loss = told[peer][0]["val_loss"]
            note = f"validation loss {loss:.4f}"
            note += f"; {share} of plain PyTorch's steps/s" if peer == "ours" else ""
            rows.append(Row(f"{TITLES[peer]}, precision {precision}", values, "step/s", note))
    return rows


def seed_rows(options: argparse.Namespace) -> list[Row]:
    """The script at its defaults, with each seed."""
    bits, minutes = [], []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, REPOSITORY / "examples" / "gpt" / "model_pretrain.py"]
            done = run([*command, "--output-dir", folder, "--seed", seed], Path(folder))
            from megakit.reporting.metrics import read_metrics

            loss = read_metrics(Path(folder, "pretrain", "metrics.csv"))[-1].val_loss
            assert loss is not None
            bits.append(loss / math.log(2))
            minutes.append(done.seconds / 60)
        print(f"seed {seed}: {bits[-1]:.3f} bits, {minutes[-1]:.1f} min", file=sys.stderr)
    each = ", ".join(f"{value:.3f}" for value in bits)
    note = f"seeds {', '.join(map(str, options.seeds))}: {each}"
    return [
        Row("validation loss at the defaults", bits, "bits per byte", note),
        Row("the script, from start to end", minutes, "min"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss, time and speed of examples/gpt.")
    parser.add_argument("--device", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--rounds", type=int, default=3, help="0: no speed beside plain PyTorch")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3], help="none: no training")
    parser.add_argument("--write", action="store_true", help="put the tables into RESULTS.md")
    options = parser.parse_args()
    from examples.gpt.text_files import TextOptions, read_splits

    text = TextOptions().fingerprint()
    sizes = " and ".join(f"{len(split):,}" for split in read_splits(None))
    where = machine("nemo_toolkit", "megatron-core", device=options.device)
    device = "" if options.device == "cpu" else " on a GPU"
    sections = {}
    if options.rounds:
        lines = same_mathematics(options)
        rows = speed_rows(options)
        caption = f"{where} {options.rounds} rounds of {options.steps} steps, the first 20 not "
        caption += f"timed, {options.threads} thread(s)."
        title = f"## Training steps of examples/gpt{device}, beside plain PyTorch"
        sections["gpt-steps"] = [title, "", caption, "", *HEADER, *map(str, rows), "", *lines]
    if options.seeds:
        caption = f"{where} The text is Python's standard library ({text}), {sizes} bytes for "
        caption += "training and validation."
        title = f"## The language model of examples/gpt{device}"
        rows = seed_rows(options)
        sections["gpt"] = [title, "", caption, "", *HEADER, *map(str, rows)]
    for name, section in sections.items():
        print("\n".join(section))
        if options.write:
            write_section(name + device.replace(" on a GPU", "-gpu"), "\n".join(section))


if __name__ == "__main__":
    main()
