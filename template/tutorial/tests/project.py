"""States what the tests need to know about the scripts of this project."""

from pathlib import Path

from mnist.files import DataOptions
from tests.scripts import read_csv

# In float32, because rounding in bfloat16 would hide errors. On the CPU, which every machine has.
CPU = ("--precision", "32", "--accelerator", "cpu")
#: The scripts in the order of their stages. All scripts except the last one train.
SCRIPTS = ("model_pretrain.py", "model_finetune.py", "model_predict.py")
#: Steps of the first script, which a test stops on the way: it must take some time.
STEPS = 600
#: Options of two ranks in layouts that only this model has.
MORE_LAYOUTS: dict[str, tuple[object, ...]] = {}
#: Arguments that choose the data, the shape of a sample's `data`, and the number of test samples.
DATA, SHAPE, NUM_TEST = {"data_dir": DataOptions.data_dir}, (1, 28, 28), 300


def options_of(script: str, folder: Path) -> tuple[object, ...]:
    """Returns the options of a script; the folder is for data that the tests make."""
    return CPU


def check_results(runs: Path) -> None:
    """Checks that the prediction has each test image exactly once, in order."""
    rows = read_csv(runs / "predict" / "predictions.csv")
    assert [int(row["idx"]) for row in rows] == list(range(NUM_TEST))
