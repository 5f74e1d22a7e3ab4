"""Defines this project's data: handwritten digits, in the folder `digits`. Put your own data here.

The file is scikit-learn's, of Alpaydin and Kaynak's data in the UCI Machine Learning Repository.
The scripts import this file even for --help, so slow packages are imported inside the functions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from megakit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Split = Literal["train", "validation", "test"]
DIGITS = Path(__file__).resolve().parent / "digits"


@dataclass(kw_only=True)
class DataOptions:
    """Options that choose the data. Each field is an option of every script."""

    data_dir: Path = DIGITS
    """Folder that holds digits.csv.gz."""

    def fingerprint(self) -> str:
        """Checks the data before the ranks start; returns a text that identifies the content."""
        path = self.data_dir / "digits.csv.gz"
        if not path.is_file():
            raise UserError(f"{path}: there is no such file. Name its folder with --data-dir.")
        return f"digits-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


class Batch(TypedDict):
    """A batch of B images from a data loader."""

    data: Tensor  # float32 (B, 1, 28, 28) in [0, 1]
    label: Tensor  # int64 (B,)
    idx: Tensor  # int64 (B,), position in the dataset
    corrupted: NotRequired[Tensor]  # like data; if present, the model's input instead of data
    loss_mask: NotRequired[Tensor]  # float32 (B,), only in evaluation; 0 for padding


class Digits:
    """Provides one split as dictionaries. A sample depends only on its index, for Megatron."""

    def __init__(self, split: Split, data_dir: Path = DIGITS) -> None:
        import numpy as np

        table = np.loadtxt(data_dir / "digits.csv.gz", np.uint8, delimiter=",")
        sixth = np.arange(len(table)) % 6
        table = table[{"train": sixth > 1, "validation": sixth == 1, "test": sixth == 0}[split]]
        # Enlarges 8x8 pixels from 0 to 16 to 24x24 pixels from 0 to 240, with a margin of 2 pixels.
        pixels = np.kron(table[:, :-1].reshape(-1, 8, 8), np.full((3, 3), 15, np.uint8))
        self.images = np.pad(pixels, ((0, 0), (2, 2), (2, 2)))
        self.labels = table[:, -1]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import numpy as np

        batch: Any = self.get_batch(np.array([index]))
        return {name: values[0] for name, values in batch.items()}

    def get_batch(self, indices: Any) -> Batch:
        """Returns the samples of indices, int64 (B,). This method is optional, and faster."""
        from megakit.data import on_device, take

        rows = on_device(indices)
        data = take(self.images, rows).unsqueeze(1).float().div_(255)
        label = take(self.labels, rows).long()
        return {"data": data, "label": label, "idx": rows % len(self)}


def read_splits(data_dir: Path) -> tuple[Digits, Digits, Digits]:
    """Returns the datasets for training, validation and test."""
    return Digits("train", data_dir), Digits("validation", data_dir), Digits("test", data_dir)
