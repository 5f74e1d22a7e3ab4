"""Draws the picture of docs/concepts.md: which function calls which in one training step.

    python docs/images/make_step.py

`tests/docs/test_training_step.py` compares `CALLS` with the calls of a real training step.
"""

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).resolve().parent / "training_step.svg"
WIDTH, ROW, INDENT, MARGIN, TOP = 840, 46, 20, 20, 106
#: Of each owner: the fill of its rows on a light and on a dark screen.
FILLS = {
    "Lightning": ("#eadcf8", "#4a3560"),
    "NeMo": ("#dcefd6", "#2f4d2a"),
    "Megatron-Core": ("#d7e8fb", "#26425f"),
    "yours": ("#fdebc8", "#5c4413"),
    "megakit": ("#f8d9dc", "#5f2a33"),
}


@dataclass(frozen=True)
class Call:
    """One call of a training step.

    Attributes:
        depth: How many calls of the picture are around this call.
        owner: Whose function is called; a key of `FILLS`.
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

    @property
    def origin(self) -> str:
        """What megakit's function has to do with the frameworks, or nothing."""
        is_subclass = self.instead.startswith("subclass")
        return self.instead if is_subclass or not self.instead else f"in place of {self.instead}"

    @property
    def name(self) -> str:
        """The function without its module."""
        return self.function.partition(":")[2]


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_STRATEGY = "megakit.nemo.strategy:ExactStrategy"

CALLS = [
    Call(
        0,
        "megakit",
        "megakit.nemo.fit:train",
        "sets up the loop and the callbacks, and calls trainer.fit",
        instead="NeMo's llm.train",
        is_numbered=False,
    ),
    Call(1, "Lightning", "lightning.pytorch.trainer.trainer:Trainer.fit", "runs the training"),
    Call(
        2,
        "megakit",
        "megakit.nemo.step_loop:StepLoop.advance",
        "runs one step, and the hooks around it",
        instead="Lightning's _TrainingEpochLoop",
    ),
    Call(
        3,
        "megakit",
        f"{_STRATEGY}.optimizer_step",
        "passes the rest of the step as a closure",
        instead="subclass of NeMo's MegatronStrategy",
    ),
    Call(
        4,
        "NeMo",
        "nemo.core.optim.mcore_optim:McoreDistributedOptimizer.step",
        "runs the closure, and then Megatron's optimizer",
    ),
    Call(
        5,
        "megakit",
        f"{_STRATEGY}.training_step",
        "sets the gradient buffers to 0",
        instead="subclass of NeMo's MegatronStrategy",
    ),
    Call(
        6,
        "megakit",
        "megakit.nemo.micro_batches:Step.run",
        "calls Megatron's schedule, then the loss's reduce",
        instead="NeMo's MegatronParallel.training_step",
        is_numbered=False,
    ),
    Call(
        7,
        "Megatron-Core",
        f"{_SCHEDULES}:forward_backward_no_pipelining",
        "the schedule: loops over the micro batches",
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
        "stores the previous stage's output",
        repeated=True,
    ),
    Call(
        9,
        "megakit",
        "megakit.nemo.micro_batches:next_batch",
        "reads one micro batch; copies it to the device",
        instead="NeMo's default_data_step",
        repeated=True,
    ),
    Call(
        9,
        "yours",
        "model_components:BionemoLightningModule.training_step",
        "returns the model's output, not a loss",
        repeated=True,
    ),
    Call(
        10, "yours", "model_components:PretrainModel.forward", "computes the output", repeated=True
    ),
    Call(
        9,
        "yours",
        "model_components:MSELossReduction.forward",
        "returns the loss and a report for the log",
        repeated=True,
    ),
    Call(
        8,
        "Megatron-Core",
        f"{_SCHEDULES}:backward_step",
        "adds the gradients to the gradient buffers",
        repeated=True,
    ),
    Call(
        8,
        "Megatron-Core",
        "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        "all-reduces the gradients over the data-parallel ranks",
    ),
    Call(
        7,
        "megakit",
        "megakit.nemo.losses:MeanLossReduction.reduce",
        "averages the reports; returns the value to log",
        instead="subclass of NeMo's MegatronLossReduction",
    ),
    Call(
        5,
        "Megatron-Core",
        "megatron.core.optimizer.optimizer:ChainedOptimizer.step",
        "clips the gradients; updates the weights",
    ),
]
#: The number of each call in the picture and on the page, or None.
NUMBERS = [
    sum(before.is_numbered for before in CALLS[: place + 1]) if call.is_numbered else None
    for place, call in enumerate(CALLS)
]

TITLE = "One training step: which function calls which"
DESCRIPTION = (
    "A numbered list of function calls. The caller of a call is the nearest call above with a "
    "smaller indent."
)


def described() -> str:
    """Returns the description for screen readers: all calls in order."""
    rows = [
        f"{numbered(number)}{call.owner}: {call.name} {call.note}"
        f"{call.origin and f' ({call.origin})'}."
        for number, call in zip(NUMBERS, CALLS, strict=True)
    ]
    return " ".join([DESCRIPTION, *rows])


def numbered(number: int | None) -> str:
    """Returns what stands before the name of a call."""
    return "" if number is None else f"{number}. "


def style() -> str:
    """Returns the picture's style sheet, for light and dark screens."""
    names = {owner: f"o{place}" for place, owner in enumerate(FILLS)}
    light = "".join(f".{names[owner]}{{fill:{fills[0]}}}" for owner, fills in FILLS.items())
    dark = "".join(f".{names[owner]}{{fill:{fills[1]}}}" for owner, fills in FILLS.items())
    return (
        "text{fill:#1a1a1a}.back{fill:#ffffff}.line{stroke:#555555;fill:none}"
        f"{light}"
        "@media (prefers-color-scheme: dark){"
        f"text{{fill:#f2f2f2}}.back{{fill:#161616}}.line{{stroke:#aaaaaa}}{dark}}}"
    )


def row(number: int | None, call: Call, top: int) -> list[str]:
    """Returns the elements of one call."""
    left = MARGIN + call.depth * INDENT
    owner = f"o{list(FILLS).index(call.owner)}"
    right = WIDTH - MARGIN - 60
    is_nemo = "NeMo" in call.instead
    framework = f"o{list(FILLS).index('NeMo' if is_nemo else 'Lightning')}"
    width = 7 * len(call.origin) + 12
    origin = [
        f'<rect class="{framework}" x="{right - width - 4}" y="{top + 4}" width="{width}" '
        f'height="18" rx="3"/>',
        f'<text x="{right - width / 2 - 4}" y="{top + 17}" font-size="12" '
        f'text-anchor="middle">{escape(call.origin)}</text>',
    ]
    return [
        f'<rect class="{owner}" x="{left}" y="{top}" width="{right - left}" '
        f'height="{ROW - 6}" rx="4"/>',
        f'<text x="{left + 8}" y="{top + 17}" font-family="monospace" font-size="13" '
        f'font-weight="bold">{numbered(number)}{escape(call.name)}</text>',
        f'<text x="{left + 8}" y="{top + 33}" font-size="13">'
        f"{escape(call.owner)}: {escape(call.note)}</text>",
        *(origin if call.origin else []),
    ]


def bracket() -> list[str]:
    """Returns the bracket beside the calls that are made for each micro batch."""
    rows = [place for place, call in enumerate(CALLS) if call.repeated]
    top, bottom = TOP + rows[0] * ROW, TOP + (rows[-1] + 1) * ROW - 6
    x, middle = WIDTH - MARGIN - 50, (TOP + rows[0] * ROW + bottom) // 2
    return [
        f'<path class="line" d="M{x},{top} h12 V{bottom} h-12"/>',
        f'<text x="{x + 30}" y="{middle}" font-size="13" text-anchor="middle" '
        f'transform="rotate(90 {x + 30} {middle})">for each micro batch</text>',
    ]


def picture() -> str:
    """Returns the picture as SVG."""
    height = TOP + ROW * len(CALLS) + MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" role="img" aria-labelledby="title desc">',
        f'<title id="title">{TITLE}</title>',
        f'<desc id="desc">{escape(described())}</desc>',
        f"<style>{style()}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}"/>',
        f'<text x="{MARGIN}" y="32" font-size="18" font-weight="bold">{TITLE}</text>',
        f'<text x="{MARGIN}" y="56" font-size="13">The caller of a row is '
        "the nearest row above with a smaller indent. Your script calls megakit's train.</text>",
    ]
    for place, owner in enumerate(FILLS):
        x = MARGIN + place * 145
        out.append(f'<rect class="o{place}" x="{x}" y="70" width="18" height="18" rx="3"/>')
        out.append(f'<text x="{x + 26}" y="84" font-size="13">{escape(owner)}</text>')
    for place, call in enumerate(CALLS):
        out += row(NUMBERS[place], call, TOP + place * ROW)
    return "\n".join([*out, *bracket(), "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
