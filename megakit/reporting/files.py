"""Writes each file completely or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file in one step when the new content is on disk; encodes text as UTF-8."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces a JSON file in one step."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")
