"""`./run layout`: the table of a script's job, and what is refused."""

import re
import sys

from megakit.testing.shares_table import in_bytes
from tests.scripts import REPOSITORY, run

DIGITS = ("--dataset", "digits")
SIZES = ("--tensor-parallel", 4, "--pipeline-parallel", 2)


def layout(script, *options):
    return run(
        *(sys.executable, "-P", "-m", "megakit.testing.layout", script, *options),
        PYTHONPATH=str(REPOSITORY),
    )


def rows(out):
    """The table's cells, without its heading."""
    lines = out.split("\n\n")[1].splitlines()
    return [re.split(" {2,}", line) for line in lines[1:]]


def test_a_cluster_of_1024_ranks(tmp_path):
    width = 65_536 // 4
    cluster = (*SIZES, "--devices", 8, "--num-nodes", 128, "--global-batch-size", 512)
    done = layout(
        *(REPOSITORY / "model_pretrain.py", *DIGITS, *cluster, "--micro-batch-size", 2),
        *("--hidden-size", 65_536),
        *("--output-dir", tmp_path / "runs"),
    )
    assert done.output().startswith(
        "PretrainModel, 1024 processes: tensor 4 x pipeline 2 x data 128; precision bf16-mixed. "
        "Each rank computes 2 micro batches of 2 samples in a step.\n"
    )
    encoder, decoder = width * (784 + 1 + 3) + 3, width * (3 + 1 + 784) + 784
    z, x_hat = 2 * (2 * 3 * 2), 2 * (2 * 784 * 2)  # micro batches, samples, values, bfloat16
    assert rows(done.out) == [
        [
            *(f"{512 * stage} to {512 * stage + 511}", "0 to 3", str(stage)),
            *(f"{number:,}", *(in_bytes(size * number) for size in (2, 4, 12))),
            *(in_bytes(tensor), in_bytes(z), in_bytes(4 * number)),
        ]
        for stage, (number, tensor) in enumerate([(encoder, z), (decoder, x_hat + z)])
    ]
    assert done.err == ""
    assert not (tmp_path / "runs").exists()


def test_a_prediction_is_refused():
    done = layout(REPOSITORY / "model_predict.py", "--devices", 2)
    assert (done.status, done.out) == (2, "")
    assert done.err == ("model_predict.py: the script does not train. Name a training script.\n")
