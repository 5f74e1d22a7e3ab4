"""Draws what two ranks have of a layer, tables and decisions: chapters 1, 4, 5, 7, 9, 11, 12.

.venv/bin/python docs/images/make_layers_and_tables.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.images.drawing import GAP, WIDTH, Picture, Row, save

#: Who has each line of a step, in the four programs of the ladder.
OWNERS = {"you": "data", "Lightning": "pipeline", "Megatron": "tensor", "NeMo": "context"}
LINES = {
    "": "PyTorch Lightning Megatron NeMo",
    "step loop": "you Lightning you Lightning",
    "gradients to 0": "you Lightning you NeMo",
    "micro batches": "one one Megatron Megatron",
    "read a batch": "you Lightning you NeMo",
    "model": "you you you you",
    "loss": "you you you you",
    "backward": "you Lightning Megatron Megatron",
    "clipping": "you Lightning Megatron Megatron",
    "optimizer step": "you Lightning you NeMo",
}
#: Bytes per weight, which the distributed optimizer divides if they are "data".
BYTES = [
    ("weight\nbf16", 2, "whole"),
    ("gradient\nfloat32", 4, "whole"),
    ("main weight\nfloat32", 4, "data"),
    ("Adam's two moments\nfloat32", 8, "data"),
]
#: Question, answer if yes, its kind, and what is below.
LAYOUTS = [
    ("Does the model fit\non one GPU?", "data parallel", "data", "no"),
    (
        "Does it, if ranks share\nthe optimizer's state?",
        "distributed optimizer,\nor FSDP2",
        "data",
        "no",
    ),
    (
        "Do its layers fit on the\nGPUs of one machine?",
        "tensor parallel\nin the machine",
        "tensor",
        "no",
    ),
    (
        "Do they fit on those\nof several machines?",
        "tensor parallel in each,\npipeline over them",
        "pipeline",
        "*And in every layout:",
    ),
    ("Is one sample too long\nfor a GPU?", "context parallel", "context", ""),
    (
        "Do the experts not fit\non a GPU?",
        "expert parallel",
        "expert",
        "All remaining ranks are data parallel.",
    ),
]
RANKS = Row("", ["*rank 0", "*rank 1"])
PASSES = Row("", ["↓ forward   ↑ backward"] * 2)
WORDS = ("outputs 0 to 31 of 64", "32 to 63 of 64", "inputs 0 to 31 of 64", "32 to 63 of 64")
LAYERS = [
    Row("tensor", [f"*column-parallel layer\n{one}" for one in WORDS[:2]], "columns"),
    Row("tensor", [f"*row-parallel layer\n{one}" for one in WORDS[2:]], "rows"),
]
TOKENS = ["tokens 0 to 31 of 64", "tokens 32 to 63 of 64"]
SAMPLES = Row("data", ["tokens of samples A", "tokens of samples B"])
TENSOR = [
    RANKS,
    PASSES,
    Row("whole", ["input, whole"] * 2),
    Row("tensor", ["*f\nforward: nothing\nbackward: all-reduce of the input's gradient"]),
    *LAYERS,
    Row("tensor", ["*g\nforward: all-reduce of the partial outputs\nbackward: nothing"]),
    Row("whole", ["output + bias, whole"] * 2),
]
GATHER = "forward: all-gather of {}\nbackward: reduce-scatter of their gradients"
SEQUENCE = [
    RANKS,
    PASSES,
    Row("sequence", TOKENS, "columns"),
    Row("whole", ["*norm\nwhole weight, own tokens"] * 2),
    Row("sequence", [GATHER.format("the tokens")]),
    *LAYERS,
    Row(
        "sequence",
        ["forward: reduce-scatter of partial outputs\nbackward: all-gather of their gradients"],
    ),
    Row("sequence", TOKENS, "columns"),
]
NORM = [
    Row("", ["\n*Once a step: the norm weight's gradient"]),
    Row("whole", ["partial:\nof tokens 0 to 31", "partial:\nof tokens 32 to 63"]),
    Row("sequence", ["all-reduce, which sums the two"]),
]
CONTEXTS = [
    Row("", ["*Context parallel: tokens are divided"]),
    RANKS,
    PASSES,
    Row("context", TOKENS, "columns"),
    Row("context", [GATHER.format("keys and values")]),
    Row("context", ["*attention\nown queries,\nall keys and values"] * 2),
]
EXPERTS = [
    Row("", ["\n*Expert parallel: experts are divided"]),
    RANKS,
    PASSES,
    SAMPLES,
    Row("whole", ["*router\n2 experts for each token"] * 2),
    Row("expert", ["all-to-all: tokens to their experts"]),
    Row("expert", ["*experts 0, 1", "*experts 2, 3"], "columns"),
    Row("expert", ["all-to-all: results back to the tokens"]),
    SAMPLES,
]
#: What `check` compares, and what it says of such a fault.
CHECK = [
    Row("", ["*Example: a norm's gradient is not summed"]),
    Row("context", ["*samples\nof each replica", "right"]),
    Row("context", ["*weights\nbefore the step", "right"]),
    Row("context", ["*loss\nof the whole batch", "right"]),
    Row("expert", ["*gradients\nof each whole weight", "*wrong\nfirst: it is named"]),
    Row("data", ["*norm\nof all gradients", "wrong\nafter it"]),
    Row("data", ["*clipping\nits factor", "wrong\nafter it"]),
    Row("data", ["*update\nof each weight", "wrong\nafter it"]),
]


def loop() -> Picture:
    """Returns the table of who has which line of a step."""
    picture = Picture("loop", "Who has each line of a training step, in four programs")
    for row, (line, owners) in enumerate(LINES.items()):
        picture.text(2, 12 + row * 28, line, "start")
        for column, owner in enumerate(owners.split()):
            kind = OWNERS.get(owner, "whole") if row else "part line"
            picture.box(102 + column * 69, row * 28, 66, 25, kind, owner)
    return picture


def memory() -> Picture:
    """Returns the bytes per weight, without and with the distributed optimizer."""
    picture = Picture("memory", "Bytes per weight, without and with the distributed optimizer")
    picture.text(WIDTH / 2, 8, "*One rank: 2 + 4 + 4 + 8 = 18 bytes")
    both = "*Four data-parallel ranks with the\n*distributed optimizer: 6 + 12 / 4 = 9 bytes"
    picture.text(WIDTH / 2, 124, both)
    x = 0.0
    for words, size, kind in BYTES:
        picture.box(2 + x * 20.9, 20, size * 20.9, 30, kind, f"*{size}")
        picture.text(2 + (x + size / 2) * 20.9, 72, words)
        for rank in range(4):
            left, top, width = 54 + x * 18, 148 + rank * 38, size * 18
            picture.text(2, top + 15, f"rank {rank}", "start")
            if kind == "data":
                picture.box(left + rank * width / 4, top, width / 4, 30, "data part")
            picture.box(left, top, width, 30, f"{kind} {'line' * (kind == 'data')}")
        x += size
    return picture


def layouts() -> Picture:
    """Returns the decisions that lead to a layout."""
    picture = Picture("layouts", "Which layout a model needs, in the order of the decisions")
    for number, (question, answer, kind, below) in enumerate(LAYOUTS):
        top = number * (44 + GAP)
        picture.box(2, top, 164, 44, "whole", question)
        picture.text(186, top + 14, "yes")
        picture.path(f"M170,{top + 27}h32m-5,-4l5,4l-5,4")
        picture.box(206, top, WIDTH - 208, 44, kind, answer)
        picture.text(100 if below == "no" else WIDTH / 2, top + 44 + GAP / 2, below)
        if below == "no":
            picture.arrow(84, top + 48, GAP - 8)
    return picture


def pictures() -> list[Picture]:
    """Returns the pictures."""
    tensor = Picture("tensor_parallel", "A column- and a row-parallel layer on two ranks")
    tensor.flow(TENSOR, back=True)
    sequence = Picture("sequence_parallel", "Sequence parallelism on two ranks")
    sequence.flow(SEQUENCE, back=True)
    sequence.flow(NORM)
    both = Picture("contexts_and_experts", "Context parallelism and expert parallelism")
    both.flow(CONTEXTS, back=True)
    both.flow(EXPERTS, back=True)
    check = Picture("check", "What check compares with one process, in the order of a step")
    check.flow(CHECK)
    return [loop(), tensor, sequence, memory(), both, check, layouts()]


if __name__ == "__main__":
    save(pictures())
