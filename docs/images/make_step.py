"""Draws which function calls which in one training step: chapter 10.

    .venv/bin/python docs/images/make_step.py

`tests/docs/test_training_step.py` compares `CALLS` with the calls of a real training step.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.images.drawing import LINE, WIDTH, Picture, save

RIGHT = WIDTH - 26
CAPTION = """The caller of a row is the nearest row above
that begins further left.
The bracket: for each micro batch."""
OWNERS = {
    "yours": "data",
    "Lightning": "pipeline",
    "NeMo": "context",
    "megakit": "expert",
    "Megatron-Core": "tensor",
}


@dataclass(frozen=True)
class Call:
    """One call of a training step.

    Attributes:
        depth: How many calls of the picture are around this call.
        owner: Whose function is called; a key of `OWNERS`.
        function: The function as `module:Class.method`.
        note: What the function does, in a few words.
        repeated: Whether the call is made for each micro batch.
        instead: What of the frameworks a function of megakit replaces; what its class extends.
        is_numbered: Whether the list on the page has the call.
    """

    depth: int
    owner: str
    function: str
    note: str
    repeated: bool = False
    instead: str = ""
    is_numbered: bool = True


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_STRATEGY = "megakit.nemo.strategy:ExactStrategy"

CALLS = [
    Call(
        0,
        "megakit",
        "megakit.nemo.fit:train",
        "sets up the loop, calls trainer.fit",
        instead="in place of NeMo's llm.train",
        is_numbered=False,
    ),
    Call(1, "Lightning", "lightning.pytorch.trainer.trainer:Trainer.fit", "runs the training"),
    Call(
        2,
        "megakit",
        "megakit.nemo.step_loop:StepLoop.advance",
        "runs one step and its hooks",
        instead="in place of Lightning's loop",
    ),
    Call(
        3,
        "megakit",
        f"{_STRATEGY}.optimizer_step",
        "passes the rest as a closure",
        instead="subclass of NeMo's strategy",
    ),
    Call(
        4,
        "NeMo",
        "nemo.core.optim.mcore_optim:McoreDistributedOptimizer.step",
        "the closure, then the optimizer",
    ),
    Call(
        5,
        "megakit",
        f"{_STRATEGY}.training_step",
        "sets the gradient buffers to 0",
        instead="subclass of NeMo's strategy",
    ),
    Call(
        6,
        "megakit",
        "megakit.nemo.micro_batches:Step.run",
        "the schedule, then the loss's reduce",
        instead="in place of NeMo's MegatronParallel",
        is_numbered=False,
    ),
    Call(
        7,
        "Megatron-Core",
        f"{_SCHEDULES}:forward_backward_no_pipelining",
        "loops over the micro batches",
    ),
    Call(
        8,
        "Megatron-Core",
        f"{_SCHEDULES}:forward_step",
        "computes one micro batch",
        repeated=True,
    ),
    Call(
        9,
        "yours",
        "model_components:ExampleModelTrunk.set_input_tensor",
        "stores the previous output",
        repeated=True,
    ),
    Call(
        9,
        "megakit",
        "megakit.nemo.micro_batches:next_batch",
        "copies a micro batch to the device",
        instead="in place of NeMo's data step",
        repeated=True,
    ),
    Call(
        9,
        "yours",
        "model_components:BionemoLightningModule.training_step",
        "returns the output, not a loss",
        repeated=True,
    ),
    Call(
        10, "yours", "model_components:PretrainModel.forward", "computes the output", repeated=True
    ),
    Call(
        9,
        "yours",
        "model_components:MSELossReduction.forward",
        "returns the loss and a report",
        repeated=True,
    ),
    Call(
        8,
        "Megatron-Core",
        f"{_SCHEDULES}:backward_step",
        "adds to the gradient buffers",
        repeated=True,
    ),
    Call(
        8,
        "Megatron-Core",
        "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        "averages over data-parallel ranks",
    ),
    Call(
        7,
        "megakit",
        "megakit.nemo.losses:MeanLossReduction.reduce",
        "averages the reports",
        instead="subclass of NeMo's loss",
    ),
    Call(
        5,
        "Megatron-Core",
        "megatron.core.optimizer.optimizer:ChainedOptimizer.step",
        "clips, and updates the weights",
    ),
]


def pictures() -> list[Picture]:
    """Returns the picture."""
    picture = Picture("training_step", "One training step: which function calls which")
    picture.text(WIDTH / 2, 25, CAPTION)
    for place, (owner, kind) in enumerate(OWNERS.items()):
        picture.key(2 + place % 3 * 122, 67 + place // 3 * 22, kind, owner)
    number, ends = 0, []
    for call in CALLS:
        number += call.is_numbered
        name = f"*{f'{number}. ' * call.is_numbered}{call.function.rpartition(':')[2]}"
        if len(name) > 36:
            name = "\n*.".join(name.rsplit(".", 1))
        words = "\n".join(filter(None, [name, call.note, call.instead]))
        x, top, height = 2 + 6 * call.depth, picture.bottom + 4, LINE * words.count("\n") + 25
        picture.box(x, top, RIGHT - x, height, OWNERS[call.owner])
        picture.text(x + 8, top + height / 2, words, "start")
        if call.repeated:
            ends += [top, top + height]
    picture.path(f"M{RIGHT + 3},{ends[0]}h6V{ends[-1]}h-6")
    return [picture]


if __name__ == "__main__":
    save(pictures())
