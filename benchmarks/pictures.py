"""Draws the README's pictures from the runs of one tutorial.

    ./run tutorial --data-dir PATH
    python benchmarks/pictures.py --data-dir PATH [--runs PATH]

They go to docs/images.
"""

import argparse
import io
from pathlib import Path

import numpy as np
from PIL import Image

# `report` makes the modules of the repository's root importable.
from report import DATA_DIR, REPOSITORY

from megakit.checkpoints import best_checkpoint
from megakit.runtime.accelerator import use_accelerator
from megakit.training.metrics_csv import read_metrics
from mnist.drawing import Picture, pairs
from mnist.figure_style import to_png
from mnist.figures import curves
from mnist.files import read_mnist
from mnist.report import reconstruct

FOLDER = REPOSITORY / "docs" / "images"


def loss_curves(runs: Path) -> Picture:
    """The curves of both trainings, side by side."""
    stages = {"pretrain": "Pretraining", "finetune": "Fine-tuning"}
    pngs = [
        to_png(curves(read_metrics(runs / folder / "metrics.csv"), title))
        for folder, title in stages.items()
    ]
    pictures = [np.asarray(Image.open(io.BytesIO(png)).convert("RGB")) for png in pngs]
    return np.concatenate(pictures, axis=1)


def reconstructions(runs: Path, data_dir: Path) -> Picture:
    """The first test image of each digit, and the autoencoder's reconstructions."""
    import model_components  # noqa: F401  (checkpoints name their model's config)

    images, labels = read_mnist(data_dir, train=False)
    originals = images[np.unique(labels, return_index=True)[1]]
    checkpoint = best_checkpoint(runs / "pretrain" / "checkpoints")
    assert checkpoint is not None, f"no checkpoint of pretraining in {runs}"
    return pairs(originals, reconstruct(checkpoint, originals))


def save(name: str, png: bytes, width: int) -> None:
    """Writes a picture, no wider than that and with 128 colours: it is part of the repository."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    if picture.width > width:
        size = width, round(picture.height * width / picture.width)
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    picture.quantize(128).save(FOLDER / name, optimize=True)
    print(FOLDER / name, (FOLDER / name).stat().st_size)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the README's pictures.")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    options = parser.parse_args()
    use_accelerator("cpu")
    save("loss_curves.png", to_png(loss_curves(options.runs)), 1000)
    save("reconstructions.png", to_png(reconstructions(options.runs, options.data_dir)), 800)
    for name in ("latent_space.png", "confusion_matrix.png"):
        save(name, (options.runs / "predict" / name).read_bytes(), 560)


if __name__ == "__main__":
    main()
