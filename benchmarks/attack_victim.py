"""The copy of a checkpoint that one mutation changes."""

import random
from dataclasses import dataclass
from pathlib import Path

METADATA = "weights/.metadata"
COMMON = "weights/common.pt"
BACKENDS = "weights/metadata.json"
CONTEXT = "context/io.json"
JSON_FILES = (BACKENDS, CONTEXT)
BYTES = "pickle among the tensors"


@dataclass(frozen=True)
class Victim:
    """A checkpoint to be mutated, and what a mutation may use.

    Attributes:
        folder: The checkpoint.
        trace: The file that payloads create.
        canary: A file outside of the checkpoint, for mutations that point outside.
        other: A checkpoint of another stage.
        sibling: A checkpoint of the same stage after another step.
        dice: Decides whatever is random.
    """

    folder: Path
    trace: Path
    canary: Path
    other: Path
    sibling: Path
    dice: random.Random

    def draw(self, pattern: str) -> Path:
        """One of the files that a pattern matches."""
        return self.dice.choice(sorted(self.folder.glob(pattern)))
