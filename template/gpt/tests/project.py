"""States what the tests need to know about the scripts of this project."""

from pathlib import Path

from tests.scripts import REPOSITORY

# In float32, because rounding in bfloat16 would hide errors. On the CPU, which every machine has.
CPU = ("--precision", "32", "--accelerator", "cpu")
#: The scripts in the order of their stages. All scripts except the last one train.
SCRIPTS = ("model_pretrain.py", "model_sample.py")
#: Steps of the first script, which a test stops on the way: it must take some time.
STEPS = 90
#: Options of two ranks in layouts that only this model has.
MORE_LAYOUTS: dict[str, tuple[object, ...]] = {
    "sequence": ("--tensor-parallel", 2, "--sequence-parallel"),
    "optimizer": ("--distributed-optimizer",),
}


def options_of(script: str, folder: Path) -> tuple[object, ...]:
    """Returns the options of a script; the folder is for data that the tests make."""
    if script == "model_sample.py":
        return *CPU, "--num-bytes", 20
    small = ("--num-layers", 2, "--hidden-size", 32, "--block-size", 32, "--global-batch-size", 8)
    return *CPU, "--text", REPOSITORY / "tests", *small


def check_results(runs: Path) -> None:
    """Checks the length of the text: the prompt and the new bytes."""
    assert len((runs / "sample" / "sample.txt").read_bytes()) == len("import ") + 20
