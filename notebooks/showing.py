"""Shows sources, images and curves in the notebook."""

import inspect
import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Image, Markdown, display

from megakit.training import Predictions
from mnist import drawing
from mnist.figure_style import to_png

ROOT = Path(__file__).resolve().parents[1]


def show_source(*items: Any) -> None:
    """Shows the source of classes and functions, each below its name and its file."""
    for item in items:
        file = Path(inspect.getfile(inspect.unwrap(item))).relative_to(ROOT)
        code = textwrap.dedent(inspect.getsource(item))
        display(Markdown(f"`{item.__qualname__}` in {file}\n\n```python\n{code}```"))


def show_figure(figure: Any, result: str) -> None:
    """Shows a figure, and its result as text for readers who cannot see the figure."""
    display(figure, metadata={"image/png": {"alt": result}})
    display(Markdown(f"*{result}*"))


def draw_images(images: torch.Tensor, columns: int, titles: tuple[str, ...] = ()) -> Image:
    """Draws images (N, 28, 28) with values in [0, 1] as dark ink on white."""
    ink = (255 - 255 * images.clip(0, 1)).byte().numpy()
    captions = [[(title, "black")] for title in titles] or [[]] * len(ink)
    picture = drawing.captioned(ink, captions, columns, scale=24 // columns, font_size=12)
    return Image(to_png(picture))


def draw_mistakes(images: np.ndarray, worst: Predictions) -> Image:
    """Draws the images (of N, 28, 28) of some wrong predictions, each above its labels."""
    return Image(to_png(drawing.mistakes(images[worst.idx], worst, columns=10)))


def column(run: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps and the values of a column of a run's metrics.csv."""
    rows = np.genfromtxt(run / "metrics.csv", delimiter=",", names=True)
    rows = rows[~np.isnan(rows[name])]  # a loss is not in each row
    return rows["step"], rows[name]


def draw_curves(run: Path, quantity: str) -> dict[str, float]:
    """Shows training and validation loss, cut off above 4 times the last; returns the last."""
    figure, ax = plt.subplots(figsize=(7, 2.6))
    ax.plot(*column(run, "train_loss"), label="train_loss")
    ax.plot(*column(run, "val_loss"), "o--", label="val_loss")
    losses = column(run, "val_loss")[1]
    ax.set(xlabel="optimizer step", ylabel=quantity, ylim=(0, 4 * losses[-1]))
    ax.legend(frameon=False)
    plt.close(figure)  # otherwise, Jupyter shows it once more
    result = f"The validation's {quantity} goes from {losses[0]:.4f} to {losses[-1]:.4f}."
    show_figure(figure, result)
    return {"val_loss": round(float(losses[-1]), 4)}
