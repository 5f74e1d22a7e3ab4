"""Time and peak memory of predicting 10,000 to 10 million samples.

    python benchmarks/predictions.py [--samples N...] [--write]

Each point is a process of its own. It predicts with the classifier of model_predict.py, from the
data loader to predictions.csv, summary.json and the figures. The images are computed from the
index, so that the data takes no memory. The page with the canvas, report.html, is left out.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import REPOSITORY, machine, short, write_section

SAMPLES = (10_000, 100_000, 1_000_000, 10_000_000)


class ComputedImages:
    """N images (28, 28) whose pixels and labels are computed from the index."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: value[0] for name, value in self.get_batch(np.array([index])).items()}

    def get_batch(self, indices: NDArray[np.int64]) -> dict[str, Any]:
        import torch

        idx = torch.from_numpy(indices)
        pixels = (idx % 251).byte()[:, None] * 31 + torch.arange(784).byte() * 17
        images = pixels.view(-1, 1, 28, 28).float() / 255
        return {"data": images, "label": idx % 10, "idx": idx}


def predict(num_samples: int, runs: Path) -> dict[str, Any]:
    """Predicts in this process; returns seconds, MB at the peak, and MB of predictions.csv."""
    from megakit.job.notebook import open_run
    from megakit.runtime.accelerator import keep_freed_memory
    from model_predict import PREDICT, PredictOptions

    options = PredictOptions(dataset="digits", output_dir=runs, precision="32", accelerator="cpu")
    began = time.perf_counter()
    keep_freed_memory()
    with open_run(PREDICT, options) as run:
        from megakit.data import MegatronDataModule
        from model_components import BionemoLightningModule, ExampleFineTuneConfig, build_trainer

        data = MegatronDataModule(run.layout.micro_batch_size)
        data.test_set = ComputedImages(num_samples)
        config = ExampleFineTuneConfig(initial_ckpt_path=run.start)
        trainer = build_trainer(run)
        trainer.predict(BionemoLightningModule(config=config), data)
        predicted = time.perf_counter()
        path = run.finish(trainer)
        ended = time.perf_counter()
    predicting = json.loads(run.directory.summary.read_text())["seconds"]
    return {
        "seconds": ended - began,
        "predicting": predicting,
        "writing": ended - predicted,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
        "file": path.stat().st_size / 1e6,
    }


def measure(samples: list[int]) -> dict[int, dict[str, Any]]:
    """Trains a classifier for a moment, and predicts each number of samples in a new process."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        finetune = ("--dataset", "digits", "--checkpoint", "none", "--max-steps", "20")
        training = [REPOSITORY / "model_finetune.py", *finetune, "--output-dir", folder]
        subprocess.run([sys.executable, *map(str, training)], check=True, capture_output=True)
        for number in samples:
            command = [sys.executable, __file__, "--child", str(number), "--runs", folder]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[number] = json.loads(done.stdout.splitlines()[-1])
            print(f"{number:,}: {found[number]}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of predictions by samples.")
    parser.add_argument("--samples", type=int, nargs="+", default=SAMPLES, help="how many")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="put it into RESULTS.md")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(predict(options.child, options.runs)))
        return
    found = measure(options.samples)
    caption = machine("nemo_toolkit", "megatron-core").replace("; median, lowest to highest", "")
    least = min(told["megabytes"] for told in found.values())
    most = max(told["megabytes"] for told in found.values())
    lines = [
        "## Predictions by number of samples",
        "",
        f"{caption} One run for each number of samples, one process, float32. The images are "
        "computed from the index, and no report.html is written. The largest predictions.csv has "
        f"{short(max(told['file'] for told in found.values()))} MB.",
        "",
        "| samples | peak memory | whole process | predicting alone | merging and writing |",
        "|---|---|---|---|---|",
    ]
    for number, told in found.items():
        cells = [f"{short(told['megabytes'])} MB"]
        cells += [f"{short(told[name])} s" for name in ("seconds", "predicting", "writing")]
        lines.append(f"| {number:,} | {' | '.join(cells)} |")
    lines += ["", f"The largest peak is {short(most / least)} times the smallest."]
    print("\n".join(lines))
    if options.write:
        write_section("predictions", "\n".join(lines))


if __name__ == "__main__":
    main()
