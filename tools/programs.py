"""What the commands know of a program: its options for a layout, its ranks, and why it failed."""

import argparse
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megakit.errors import UserError

#: Kinds of parallelism with the options of this project's programs and of Megatron-LM's.
WORDS = {
    "TP": ("--tensor-parallel", "--tensor-model-parallel-size"),
    "SP": ("--sequence-parallel",),
    "PP": ("--pipeline-parallel", "--pipeline-model-parallel-size"),
    "VP": ("--chunks", "--num-virtual-stages-per-pipeline-rank"),
    "DP": (),  # what the other kinds leave
    "DO": ("--distributed-optimizer", "--use-distributed-optimizer"),
    "CP": ("--context-parallel", "--context-parallel-size"),
    "EP": ("--expert-parallel", "--expert-model-parallel-size"),
    "MB": ("--micro-batch-size",),
}
IN_WORDS = {
    "TP": "tensor parallel",
    "SP": "sequence parallel",
    "PP": "pipeline parallel",
    "VP": "interleaved stages",
    "DP": "data parallel",
    "DO": "the distributed optimizer",
    "CP": "context parallel",
    "EP": "expert parallel",
    "MB": "other micro batches",
}
#: Options that say how many ranks share a model. The other ranks are data parallel.
SIZES = ("--tensor-parallel", "--pipeline-parallel", "--context-parallel")
#: Variables that keep messages of the frameworks off standard output, or silence them.
QUIET = {"NEMO_REDIRECT_LOGS_TO_STDERR": "1", "PYTHONWARNINGS": "ignore"}
#: Kinds that need another one, which they bring along if it is not named.
NEEDS = {"SP": "TP", "VP": "PP", "DO": "DP"}
DEFAULT = (
    *("MB4", "TP2", "SP", "PP2", "VP2", "DP2", "DO", "CP2", "EP2"),
    *("TP2xPP2", "TP2xDP2", "PP2xDP2", "SPxDO", "TP2xCP2", "TP2xEP2", "TP2xPP2xDP2"),
)


@dataclass(frozen=True)
class Layout:
    """How a job is divided: sizes by kind, such as {"TP": 2, "DP": 2}."""

    name: str
    sizes: dict[str, int]

    @property
    def ranks(self) -> int:
        """Returns the number of processes."""
        return math.prod(self.sizes.get(kind, 1) for kind in ("TP", "PP", "CP", "DP"))


def parse_layout(name: str) -> Layout:
    """Returns the layout of a name.

    Raises:
        UserError: The name is not made of kinds and sizes.
    """
    sizes: dict[str, int] = {}
    for part in name.split("x"):
        found = re.fullmatch(rf"({'|'.join(WORDS)})(\d*)", part)
        if found is None or found[1] in sizes or found[2] in ("0", "1"):
            raise UserError(
                f"layout {name}: expected kinds and sizes such as TP2, SP or TP2xPP2; the kinds "
                f"are {', '.join(WORDS)}."
            )
        sizes[found[1]] = int(found[2] or 2)
    for kind, needed in NEEDS.items():
        if kind in sizes:
            sizes.setdefault(needed, 2)
    if (experts := sizes.get("EP", 1)) > sizes.get("CP", 1) * sizes.get("DP", 1):
        sizes["DP"] = experts // sizes.get("CP", 1)
    return Layout(name, sizes)


class Words:
    """The options of a program.

    Args:
        text: What its --help prints.
        given: The user's own, by layout, or by kind with {} for the size: {"TP": "--tp {}"}.
    """

    def __init__(self, text: str, given: dict[str, str]) -> None:
        self.text, self.given = text, given

    def find(self, words: Sequence[str]) -> str | None:
        """Returns the first of these options that the program has."""
        found = (one for one in words if re.search(rf"(?<![\w-]){one}(?![\w-])", self.text))
        return next(found, None)

    def options(self, layout: Layout) -> list[str]:
        """Returns the options for a layout.

        Raises:
            UserError: The program has none for one of its kinds.
        """
        if layout.name in self.given and layout.name not in WORDS:  # `SP` alone is a kind
            return self.given[layout.name].split()
        options = []
        for kind, size in layout.sizes.items():
            if kind == "DP":
                continue
            own = self.given.get(f"{kind}{size}", self.given.get(kind, "").format(size))
            word = self.find(WORDS[kind])
            if own:
                options += own.split()
            elif word is None:
                raise UserError(f"--help names no option for {IN_WORDS[kind]}")
            else:
                options += [word] if kind in ("SP", "DO") else [word, str(size)]
        if padding := self.find(["--make-vocab-size-divisible-by"]):  # times the tensor ranks
            options += [padding, str(128 // layout.sizes.get("TP", 1))]
        return options


def split_ranks(arguments: list[str]) -> tuple[int, list[str]]:
    """Returns the number of ranks of a step, and the step's own arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--devices", *SIZES, "--expert-parallel"):
        parser.add_argument(name, type=int)
    given, others = parser.parse_known_args(arguments)
    sizes = {
        f"--{name.replace('_', '-')}": size
        for name, size in vars(given).items()
        if size is not None
    }
    if problems := [f"{n} {size}: has to be at least 1." for n, size in sizes.items() if size < 1]:
        raise UserError(problems)
    devices = sizes.pop("--devices", None)
    ranks = math.prod(size for name, size in sizes.items() if name in SIZES)
    # Ranks that share experts share the tokens of a sample, or are data parallel.
    context, experts = sizes.get("--context-parallel", 1), sizes.get("--expert-parallel", 1)
    ranks *= math.lcm(context, experts) // context
    if devices and devices % ranks:
        raise UserError(
            f"--devices {devices}: has to be a multiple of {ranks}, which the other options need. "
            f"Use --devices {ranks}, for example."
        )
    return devices or ranks, others + [part for item in sizes.items() for part in map(str, item)]


def hide_gpus(ranks: int) -> None:
    """Lets all programs compute on the CPU if there are GPUs, but not one for each rank."""
    import torch

    if 0 < torch.cuda.device_count() < ranks:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def told_by(text: str, program: str, log: object) -> str:
    """Returns what a person has to know of the log of a program that failed.

    Raises:
        UserError: The program has refused its options.
    """
    if problems := re.findall(rf"^{re.escape(program)}: (.*)", text, re.MULTILINE):
        raise UserError(problems)
    error = re.search(r"^(\[rank\d+\]: )?[\w.]*(Error|Exception)\b.*", text, re.MULTILINE)
    last = text.strip().rpartition("\n")[2]
    return f"{error[0] if error else last}\nThe traceback is in {log}."
