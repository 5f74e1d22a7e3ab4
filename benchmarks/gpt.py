"""The loss and the minutes of examples/gpt at its defaults, with each seed.

    python benchmarks/gpt.py [--seeds 1 2 3] [--write]

`--write` puts the table into RESULTS.md.
"""

import argparse
import math
import sys
import tempfile
from pathlib import Path

from report import REPOSITORY, Row, parser_of, publish
from times import run


def seed_rows(options: argparse.Namespace) -> list[Row]:
    """The script at its defaults, with each seed."""
    bits, minutes = [], []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, REPOSITORY / "examples" / "gpt" / "model_pretrain.py"]
            done = run([*command, "--output-dir", folder, "--seed", seed], Path(folder))
            from megakit.training.metrics_csv import read_metrics

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
    parser = parser_of("Loss and time of examples/gpt.", needs_images=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    from examples.gpt.text_files import TextOptions, read_splits

    text = TextOptions().fingerprint()
    sizes = " and ".join(f"{len(split):,}" for split in read_splits(None))
    about = f"The text: Python's standard library ({text}), {sizes} bytes to train and validate on."
    rows = seed_rows(options)
    publish("gpt", "The language model of examples/gpt", rows, options.write, "", about)


if __name__ == "__main__":
    main()
