"""Lists what `./run ladder` and `./run ladder gpt` compare."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Program:
    """A file that trains, with its row of the table.

    Attributes:
        path: The file, relative to the repository.
        row: Name of the row, if the row is not the first one of its file.
        options: Its own options.
        ranks: Number of processes.
        is_first: Whether this and the following rows are compared with this one.
    """

    path: str
    row: str = ""
    options: str = ""
    ranks: int = 1
    is_first: bool = False

    @property
    def file(self) -> Path:
        """The path of the file."""
        return ROOT / self.path

    @property
    def name(self) -> str:
        """The first cell of the row."""
        return f"  {self.row}" if self.row else self.file.name


ONE, TWO, THREE = "ladder/1_torch.py", "ladder/2_lightning.py", "ladder/3_megatron.py"
AUTOENCODER = (
    Program(ONE, is_first=True),
    Program(TWO),
    Program(THREE),
    Program(THREE, "2 tensor-parallel ranks", "--tensor-parallel 2", ranks=2),
    Program(THREE, "2 pipeline stages", "--pipeline-parallel 2", ranks=2),
    Program(THREE, "2 data-parallel ranks", ranks=2),
    Program("ladder/4_nemo.py"),
    Program("model_pretrain.py"),
)

TORCH, FSDP, MEGATRON = (f"ladder/gpt/{name}.py" for name in ("1_torch", "2_fsdp", "3_megatron"))
TENSOR, PIPELINE, CONTEXT = (f"--{name}-parallel 2" for name in ("tensor", "pipeline", "context"))
SEQUENCE = f"{TENSOR} --sequence-parallel"
INTERLEAVED = f"{PIPELINE} --chunks 2"
SHARES = "--distributed-optimizer"
EXPERTS, DIVIDED = "--experts 4", "--experts 4 --expert-parallel 2"
GPT = (
    Program(TORCH, is_first=True),
    Program(FSDP),
    Program(FSDP, "2 ranks", ranks=2),
    Program(MEGATRON),
    Program(MEGATRON, "TP2", TENSOR, ranks=2),
    Program(MEGATRON, "TP2, sequence parallel", SEQUENCE, ranks=2),
    Program(MEGATRON, "PP2", PIPELINE, ranks=2),
    Program(MEGATRON, "PP2, interleaved", INTERLEAVED, ranks=2),
    Program(MEGATRON, "DP2", ranks=2),
    Program(MEGATRON, "DP2, distributed optimizer", SHARES, ranks=2),
    Program(MEGATRON, "CP2", CONTEXT, ranks=2),
    Program(MEGATRON, "CP2, distributed optimizer", f"{CONTEXT} {SHARES}", ranks=2),
    Program(MEGATRON, "TP2 x CP2, sequence par.", f"{SEQUENCE} {CONTEXT}", ranks=4),
    Program(MEGATRON, "TP2 x PP2, sequence par.", f"{SEQUENCE} {PIPELINE}", ranks=4),
    Program(TORCH, "experts: 1_torch.py", EXPERTS, is_first=True),
    Program(MEGATRON, "experts", EXPERTS),
    Program(MEGATRON, "experts: EP2", DIVIDED, ranks=2),
    Program(MEGATRON, "experts: EP2, all-gather", f"{DIVIDED} --dispatcher allgather", ranks=2),
    Program(MEGATRON, "experts: EP2, distr. opt.", f"{DIVIDED} {SHARES}", ranks=2),
    Program(MEGATRON, "experts: TP2, sequence", f"{EXPERTS} {SEQUENCE}", ranks=2),
    Program(MEGATRON, "experts: PP2, interleaved", f"{EXPERTS} {INTERLEAVED}", ranks=2),
    Program(MEGATRON, "experts: CP2", f"{EXPERTS} {CONTEXT}", ranks=2),
    Program(MEGATRON, "experts: CP2 x EP2", f"{DIVIDED} {CONTEXT}", ranks=4),
)
LADDERS = {"": AUTOENCODER, "gpt": GPT}


def steps_of(programs: tuple[Program, ...]) -> dict[str, Program]:
    """Returns the steps of a ladder by their number, which begins the name of a file."""
    return {program.name[0]: program for program in programs if program.name[0].isdigit()}
