"""Reads what a run leaves behind, with no code of the library: it would agree with itself."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import run

LOCK = ".lock"


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [path for path in folder.glob("step=*") if re.fullmatch(r"step=\d{6,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step=")))


def read_whole(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, whose files have to be those that it lists, and no others."""
    manifest: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())
    found = {
        path.relative_to(checkpoint).as_posix(): {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    assert found == manifest["files"]
    assert manifest["step"] == int(checkpoint.name.removeprefix("step="))
    return manifest


def lowest_loss(checkpoints: list[Path]) -> Path | None:
    """The checkpoint with the lowest validation loss, the older one of two."""
    losses = {path: read_whole(path)["val_loss"] for path in checkpoints}
    validated = [path for path in checkpoints if losses[path] is not None]
    return min(validated, key=lambda path: losses[path], default=None)


def curves(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """TensorBoard's curves and pictures, as TensorBoard reads them, in the order of writing.

    Of the speed, which is another each time, only the steps.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, Any]]] = {}
    # It lists each folder with such files as a run.
    assert {path.parent for path in folder.rglob("events.out.tfevents.*")} == {folder}
    events: Any = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()
    for name in events.Tags()["scalars"]:
        is_speed = name.endswith("samples_per_second")
        found[name] = [(p.step, None if is_speed else p.value) for p in events.Scalars(name)]
    for name in events.Tags()["images"]:
        found[name] = [
            (p.step, hashlib.sha256(p.encoded_image_string).hexdigest())
            for p in events.Images(name)
        ]
    return found


def run_javascript(code: str, given: Any) -> Any:
    """The value that a script of a report, run by node, sets `result` to; it finds `given`."""
    if (node := shutil.which("node")) is None:
        pytest.skip("no node, which runs the scripts of report.html")
    script = f"""
        let result;
        const given = {json.dumps(given)};
        {code}
        process.stdout.write(JSON.stringify(result));
    """
    return json.loads(run(node, "-", stdin=script, timeout=120).output())
