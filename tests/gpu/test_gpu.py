"""On a GPU: the chain in bf16, resumption, NCCL, and the same results as a CPU in float32.

pytest is all that these tests need beyond the tutorial's packages. Each test computes in processes
of its own, because a pytest that has opened a GPU keeps it.
"""

import json
import os

import numpy as np
import pytest

from megakit.testing import RankError, Ranks, distributed_model_parallel_state
from tests.faults.harness import BEFORE_STEP, Fault, Training
from tests.scripts import accuracy, output_of, read_csv, read_json, run_script

pytestmark = pytest.mark.gpu

#: A rehearsed GPU is a hundred times slower than one: trainings are shorter there, and learn less.
REHEARSED = "REHEARSE_GPUS" in os.environ
DIGITS = ("--dataset", "digits")
SHORT = (*DIGITS, "--max-steps", 10 if REHEARSED else 50, "--global-batch-size", 64)
# Relative. `--precision 32` uses no TF32, so both compute in float32, in other orders.
LOSS_TOLERANCE = 1e-4


def run(script, *arguments):
    result = run_script(script, *arguments)
    assert result.status == 0, result.err
    return result


def rows(runs):
    return read_csv(runs / "pretrain" / "metrics.csv")


def test_the_chain_in_bf16(tmp_path):
    common = ("--accelerator", "gpu", "--output-dir", tmp_path)
    training = SHORT if REHEARSED else DIGITS
    run("model_pretrain.py", *training, *common)
    run("model_finetune.py", *training, *common)
    run("model_predict.py", *DIGITS, *common)
    summary = read_json(tmp_path / "predict" / "summary.json")
    assert (summary["accelerator"], summary["precision"]) == ("gpu", "bf16-mixed")
    if not REHEARSED:
        assert accuracy(tmp_path / "predict" / "predictions.csv") >= 0.9


@pytest.mark.parametrize("precision", ["bf16-mixed", "32"])
def test_a_gpu_that_works_is_found(precision):
    told = output_of(
        "from megakit.runtime import find_accelerator\n"
        f"found = find_accelerator('gpu', '{precision}')\n"
        f"assert found == find_accelerator('auto', '{precision}')\n"
        "print(found.name, found.count >= 1, found.remark, found.device)",
        CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
    )
    assert told.startswith("gpu True None ")


def test_resumption_is_exact(tmp_path):
    options = ("--accelerator", "gpu", "--micro-batch-size", 128)
    whole = Training(tmp_path / "whole", options=options)
    assert whole.start().status == 0
    stopped = Training(tmp_path / "stopped", options=options)
    start = stopped.start(Fault(BEFORE_STEP, 16, name="SIGTERM"))
    assert start.status == 143, start.err
    assert stopped.start().status == 0
    assert stopped.result() == whole.result()


def test_float32_is_the_same_on_gpu_and_cpu(tmp_path):
    for device in ("cpu", "gpu"):
        arguments = ("--accelerator", device, "--precision", 32, "--output-dir", tmp_path / device)
        run("model_pretrain.py", *SHORT, *arguments)
    assert rows(tmp_path / "cpu")[-1]["val_loss"]
    for ours, theirs in zip(rows(tmp_path / "gpu"), rows(tmp_path / "cpu"), strict=True):
        for column in ("train_loss", "val_loss"):
            if theirs[column]:
                expected = pytest.approx(float(theirs[column]), rel=LOSS_TOLERANCE)
                assert float(ours[column]) == expected


def test_a_checkpoint_of_the_cpu_predicts_the_same_on_the_gpu(tmp_path):
    common = ("--precision", 32, "--output-dir")
    training = (*SHORT, "--checkpoint", "none", "--accelerator", "cpu")
    run("model_finetune.py", *training, *common, tmp_path)
    start = read_json(tmp_path / "finetune" / "summary.json")["checkpoint"]
    found = {}
    for device in ("cpu", "gpu"):
        arguments = (*common, tmp_path / device, "--accelerator", device, "--checkpoint", start)
        run("model_predict.py", *DIGITS, *arguments)
        table = read_csv(tmp_path / device / "predict" / "predictions.csv")
        found[device] = np.array([[float(row[f"p{k}"]) for k in range(10)] for row in table])
    assert np.abs(found["cpu"] - found["gpu"]).max() <= 1e-4
    plain = np.array(json.loads(output_of(PLAIN_MODULE, start)))
    assert np.abs(found["cpu"] - plain).max() <= 1e-4


PLAIN_MODULE = """
import sys
from megakit.runtime import use_accelerator
use_accelerator("gpu")
import model_components, torch
from megakit.models import load_for_inference
from mnist.files import read_digits
images = torch.from_numpy(read_digits("test")[0]).cuda().float().div(255).reshape(-1, 1, 28, 28)
model = load_for_inference(sys.argv[1], device="cuda")
print(model(images).softmax(dim=1).tolist())
"""


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


def losses_of_ten_steps(accelerator, tensor):
    """The autoencoder under tensor parallelism, its ranks joined by gloo."""
    import torch

    from model_components import PretrainConfig

    device = "cuda" if accelerator == "gpu" else "cpu"
    with distributed_model_parallel_state(
        accelerator=accelerator, backend="gloo", tensor_model_parallel_size=tensor
    ):
        model = PretrainConfig(tensor_model_parallel_size=tensor).configure_model().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
        images = torch.rand(64, 1, 28, 28, generator=torch.Generator().manual_seed(1)).to(device)
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(images)["x_hat"], images.flatten(1))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return next(model.parameters()).shape[0], losses


def check_two_ranks(accelerator):
    with Ranks(2, accelerator=accelerator) as pool:
        ((width, alone),) = pool.run(losses_of_ten_steps, accelerator, 1, world_size=1)
        both = pool.run(losses_of_ten_steps, accelerator, 2)
    assert alone[-1] < 0.8 * alone[0]
    assert width == 64
    for half, losses in both:
        assert half == 32
        np.testing.assert_allclose(losses, alone, rtol=1e-5)


def test_two_ranks_share_a_gpu_over_gloo():
    """Tensor parallel on one GPU, for which NCCL wants two."""
    try:
        check_two_ranks("gpu")
    except RankError as error:
        if "gloo" in str(error).lower() and "cuda" in str(error).lower():
            pytest.skip(f"gpu: gloo carries no CUDA tensors here: {str(error).splitlines()[-1]}")
        raise


def test_two_gpus_give_what_one_gives(tmp_path):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("gpu: two ranks need two GPUs, NCCL allows no sharing")
    common = (*SHORT, "--accelerator", "gpu", "--precision", 32, "--output-dir")
    run("model_pretrain.py", *common, tmp_path / "one")
    for layout in ((), ("--tensor-parallel", 2), ("--pipeline-parallel", 2)):
        runs = tmp_path / str(layout)
        run("model_pretrain.py", *common, runs, "--devices", 2, *layout)
        for ours, one in zip(rows(runs), rows(tmp_path / "one"), strict=True):
            assert float(ours["train_loss"]) == pytest.approx(float(one["train_loss"]), rel=1e-5)
