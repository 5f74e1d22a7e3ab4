"""Makes a sample folder for the example: rotated digits in colour, 36x36, as PNG files.

python examples/own_images/make_sample.py [FOLDER]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as in model_train.py

from mnist.digits import Split, read_digits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def make_sample(folder: Path) -> None:
    """Writes scikit-learn's 1,797 digits to train, val and test; each call writes equal images."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(42)
    parts: dict[str, Split] = {"train": "train", "val": "validation", "test": "test"}
    for split, part in parts.items():
        for name in NAMES:
            (folder / split / name).mkdir(parents=True, exist_ok=True)
        for number, (digit, label) in enumerate(zip(*read_digits(part), strict=True)):
            turned = Image.fromarray(digit).rotate(rng.uniform(-20, 20)).resize((36, 36))
            ink = np.asarray(turned)[:, :, None] / 255
            paper, color = rng.uniform(0, 100, 3), rng.uniform(156, 255, 3)
            pixels = (paper + ink * (color - paper)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / split / NAMES[label] / f"{number:04}.png")


if __name__ == "__main__":
    make_sample(Path(sys.argv[1] if len(sys.argv) > 1 else "sample-images"))
