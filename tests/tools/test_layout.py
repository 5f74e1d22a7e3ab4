"""`./run layout`: the table of a script's job, and what is refused."""

import re
import sys

import pytest

from tests.scripts import REPOSITORY, run
from tools.shares_table import in_bytes

DIGITS = ("--dataset", "digits")
SIZES = ("--tensor-parallel", 4, "--pipeline-parallel", 2)


def layout(script, *options):
    return run(
        *(sys.executable, "-P", "-m", "tools.layout", script, *options),
        PYTHONPATH=str(REPOSITORY),
    )


def rows(out):
    """The cells of each table, without their headings."""
    tables = [text for text in out.split("\n\n") if text.startswith("rank")]
    return [[re.split(" {2,}", line) for line in text.splitlines()[1:]] for text in tables]


@pytest.mark.long
def test_a_cluster_of_1024_ranks(tmp_path):
    width = 100_000 // 4  # the model needs 2.5 GB to train, and no memory here
    cluster = (*SIZES, "--devices", 8, "--num-nodes", 128, "--global-batch-size", 512)
    done = layout(
        *(REPOSITORY / "model_pretrain.py", *DIGITS, *cluster, "--micro-batch-size", 2),
        *("--hidden-size", 100_000),
        *("--output-dir", tmp_path / "runs"),
    )
    assert done.output().startswith(
        "PretrainModel, 1024 processes: tensor 4 x pipeline 2 x data 128.\n"
        "Each rank computes 2 micro batches of 2 samples in a step; precision bf16-mixed.\n"
        "Rank = tensor rank + 4 x data rank + 512 x stage.\n"
    )
    encoder, decoder = width * (784 + 1 + 3) + 3, width * (3 + 1 + 784) + 784
    ranks = ["0 to 511", "512 to 1023"]
    (stored,) = rows(done.out)
    assert stored == [
        [
            *(ranks[stage], str(stage), f"{number:,}"),
            *(in_bytes(size * number) for size in (2, 4, 12)),
        ]
        for stage, number in enumerate([encoder, decoder])
    ]
    assert max(map(len, done.out.splitlines())) <= 80
    assert done.err == ""
    assert not (tmp_path / "runs").exists()


def test_a_prediction_is_refused():
    done = layout(REPOSITORY / "model_predict.py", "--devices", 2)
    assert (done.status, done.out) == (2, "")
    assert done.err == ("model_predict.py: the script does not train. Name a training script.\n")
