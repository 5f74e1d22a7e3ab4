"""Draws the README's pictures from the runs of one tutorial.

    ./run tutorial --data-dir PATH
    python benchmarks/pictures.py --data-dir PATH [--runs PATH]

They go to docs/images.
"""

import argparse
import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

# `report` makes the modules of the repository's root importable.
from report import DATA_DIR, REPOSITORY

from megakit.job import RunDirectory
from megakit.runtime.accelerator import use_accelerator
from megakit.training.metrics_csv import read_metrics
from mnist import report as digit_report
from mnist.figure_style import BAD, GOOD, figure_style, to_png
from mnist.files import read_mnist

FOLDER = REPOSITORY / "docs" / "images"


def loss_curves(runs: Path) -> Figure:
    """Training and validation loss of both stages."""
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    for axes, stage in zip(figure.subplots(1, 2), ("pretrain", "finetune"), strict=True):
        rows = read_metrics(runs / stage / "metrics.csv")
        for name, color, style in (("train_loss", GOOD, "-"), ("val_loss", BAD, "o-")):
            points = [(row.step, y) for row in rows if (y := getattr(row, name)) is not None]
            label = "training" if name == "train_loss" else "validation"
            axes.plot(*zip(*points, strict=True), style, color=color, label=label)
        axes.set(title=stage, xlabel="step", ylabel="loss", yscale="log")
        axes.legend(frameon=False)
    return figure


def reconstructions(runs: Path, data_dir: Path) -> Figure:
    """The first test image of each digit, and the autoencoder's reconstructions."""
    import model_components  # noqa: F401  (checkpoints name their model's config)

    images, labels = read_mnist(data_dir, train=False)
    originals = images[np.unique(labels, return_index=True)[1]]
    checkpoint = RunDirectory(runs / "pretrain").best_checkpoint()
    assert checkpoint is not None, f"no checkpoint of pretraining in {runs}"
    restored = digit_report.reconstruct(checkpoint, originals)
    figure = Figure(figsize=(8, 1.7), layout="constrained")
    for axes, picture in zip(figure.subplots(2, 10).flat, [*originals, *restored], strict=True):
        axes.imshow(picture, cmap="gray_r")
        axes.set_axis_off()
    return figure


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
    with figure_style():
        save("loss_curves.png", to_png(loss_curves(options.runs)), 800)
        save("reconstructions.png", to_png(reconstructions(options.runs, options.data_dir)), 800)
    for name in ("latent_space.png", "confusion_matrix.png"):
        save(name, (options.runs / "predict" / name).read_bytes(), 560)


if __name__ == "__main__":
    main()
