"""Draws a step and a checkpoint of ladder/3_megatron.py, which it runs: chapters 2 and 8.

.venv/bin/python docs/images/make_micro_batches_and_checkpoint.py
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.images.drawing import Picture, Row, save
from ladder.climb import ROOT, TORCHRUN, split_data
from megakit.runtime import use_megatron
from tools.shares_table import in_bytes
from tools.trace_table import rows_of

RANKS = Row("", ["*rank 0", "*rank 1"])
WEIGHT = "linear1.weight"


def start(folder: str, *arguments: object) -> None:
    """Runs Python in a folder."""
    command = [sys.executable, *map(str, arguments), *split_data([])[0]]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=variables, check=True, capture_output=True)


def micro_batches(folder: str) -> Picture:
    """Returns a step of two data-parallel ranks, as the trace shows it."""
    start(folder, "-m", "tools.trace", "--devices", 2)
    traces = json.loads(Path(folder, "runs/trace/trace.json").read_text())
    rows = [RANKS]
    for event in (row[0] for _, block in rows_of(traces, [0, 1]) for row in block):
        phase, _, number = event["phase"].partition(" ")
        if phase == "forward":
            own = slice(2 * int(number) - 2, 2 * int(number))
            read = [str(trace["samples"][own]).strip("[]") for trace in traces]
            rows.append(Row("pipeline", [f"forward {number}\nsamples {one}" for one in read]))
        elif phase == "backward":
            rows.append(Row("tensor", [f"backward {number}\nadds to the buffer"] * 2))
        elif phase == "gradients" and "bytes" in event:
            words = (
                f"*{event['kind']} of the gradient buffer\n{in_bytes(event['bytes'])}, once a step"
            )
            rows.append(Row("data", [words]))
        elif phase == "optimizer":
            rows.append(Row("whole", ["optimizer\nchanges the weights"] * 2))
    picture = Picture("micro_batches", "One step of two ranks with two micro batches each")
    picture.flow(rows)
    return picture


def checkpoint(folder: str) -> Picture:
    """Returns what a checkpoint of two tensor-parallel ranks has of a weight."""
    program = ROOT / "ladder/3_megatron.py"
    start(folder, *TORCHRUN, 2, program, "--tensor-parallel=2", "--steps=2", "--save=saved")
    use_megatron("cpu")  # .metadata has classes of Megatron
    from torch.distributed import checkpoint

    metadata: Any = checkpoint.filesystem.FileSystemReader(f"{folder}/saved").read_metadata()
    weight = metadata.state_dict_metadata[WEIGHT]
    shards, files, lines = [], [], [f"*.metadata\n{WEIGHT}: {in_words(weight.size)}"]
    for chunk in weight.chunks:
        index = checkpoint.metadata.MetadataIndex(WEIGHT, chunk.offsets)
        file, size = metadata.storage_data[index].relative_path, in_words(chunk.sizes)
        first = chunk.offsets[0]
        shards.append(f"*{WEIGHT}\nrows {first} to {first + chunk.sizes[0] - 1}")
        files.append(f"*{file}\n{size}")
        lines.append(f"{size} from {tuple(chunk.offsets)} in {file}")
    picture = Picture("checkpoint", "What a distributed checkpoint has of a weight of two ranks")
    picture.flow([RANKS, Row("tensor", shards, "rows"), Row("data", files)])
    picture.flow([Row("data", ["\n".join(lines)])])
    loaded = [f"*loaded by stage 0\nall {weight.size[0]} rows", "*loaded by stage 1\nother layers"]
    common = Row("data", ["*common.pt\nequal on all ranks: schedule, options"])
    picture.flow([common, Row("tensor", loaded)])
    return picture


def in_words(shape: Any) -> str:
    """Returns a shape such as "64 x 784"."""
    return " x ".join(map(str, shape))


def pictures() -> list[Picture]:
    """Returns the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        return [micro_batches(folder), checkpoint(folder)]


if __name__ == "__main__":
    save(pictures())
