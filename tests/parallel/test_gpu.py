"""On a GPU: the chain in bf16, NCCL, and the same results as a CPU in float32."""

import numpy as np
import pytest

from megakit.testing import Ranks, distributed_model_parallel_state
from tests.scripts import accuracy, read_csv, read_json, run_script

pytestmark = pytest.mark.gpu

SHORT = ("--dataset", "digits", "--max-steps", 50, "--global-batch-size", 64)
# Relative. TF32 is off by default in torch, so both compute in float32, in other orders.
LOSS_TOLERANCE = 1e-4


def run(script, *arguments):
    result = run_script(script, *arguments)
    assert result.status == 0, result.err
    return result


def rows(runs):
    return read_csv(runs / "pretrain" / "metrics.csv")


def test_the_chain_in_bf16(tmp_path):
    common = ("--dataset", "digits", "--accelerator", "gpu", "--output-dir", tmp_path)
    for script in ("model_pretrain.py", "model_finetune.py", "model_predict.py"):
        run(script, *common)
    summary = read_json(tmp_path / "predict" / "summary.json")
    assert (summary["accelerator"], summary["precision"]) == ("gpu", "bf16-mixed")
    assert accuracy(tmp_path / "predict" / "predictions.csv") >= 0.9


def test_float32_is_the_same_on_gpu_and_cpu(tmp_path):
    for device in ("cpu", "gpu"):
        arguments = ("--accelerator", device, "--precision", 32, "--output-dir", tmp_path / device)
        run("model_pretrain.py", *SHORT, *arguments)
    for ours, theirs in zip(rows(tmp_path / "gpu"), rows(tmp_path / "cpu"), strict=True):
        for column in ("train_loss", "val_loss"):
            if theirs[column]:
                expected = pytest.approx(float(theirs[column]), rel=LOSS_TOLERANCE)
                assert float(ours[column]) == expected


def test_a_checkpoint_of_the_cpu_predicts_the_same_on_the_gpu(tmp_path):
    common = ("--dataset", "digits", "--precision", 32, "--output-dir")
    for script in ("model_pretrain.py", "model_finetune.py"):
        run(script, *common, tmp_path, "--accelerator", "cpu", "--max-steps", 200)
    start = read_json(tmp_path / "finetune" / "summary.json")["checkpoint"]
    found = {}
    for device in ("cpu", "gpu"):
        arguments = (*common, tmp_path / device, "--accelerator", device, "--checkpoint", start)
        run("model_predict.py", *arguments)
        table = read_csv(tmp_path / device / "predict" / "predictions.csv")
        found[device] = np.array([[float(row[f"p{k}"]) for k in range(10)] for row in table])
    assert np.abs(found["cpu"] - found["gpu"]).max() <= 1e-4


def sum_of_ranks():
    import torch

    with distributed_model_parallel_state(accelerator="gpu"):
        assert torch.distributed.get_backend() == "nccl"
        total = torch.tensor(torch.distributed.get_rank() + 1, device="cuda")
        torch.distributed.all_reduce(total)
        return int(total)


@pytest.mark.parametrize("number", [1, 2])
def test_parallel_state_over_nccl(number):
    import torch

    if torch.cuda.device_count() < number:
        pytest.skip(f"gpu: {number} ranks need as many GPUs, NCCL allows no sharing")
    with Ranks(number, accelerator="gpu") as pool:
        assert pool.run(sum_of_ranks) == [number * (number + 1) // 2] * number


def test_two_gpus_give_what_one_gives(tmp_path):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("gpu: two ranks need two GPUs, NCCL allows no sharing")
    common = (*SHORT, "--accelerator", "gpu", "--precision", 32, "--output-dir")
    run("model_pretrain.py", *common, tmp_path / "one")
    for layout in ("--tensor-parallel", "--pipeline-parallel"):
        runs = tmp_path / layout
        run("model_pretrain.py", *common, runs, "--devices", 2, layout, 2)
        for ours, one in zip(rows(runs), rows(tmp_path / "one"), strict=True):
            assert float(ours["train_loss"]) == pytest.approx(float(one["train_loss"]), rel=1e-5)
