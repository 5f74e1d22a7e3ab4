"""The Python code that pages show runs: datasets.md, parallelism.md, porting.md."""

import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, distributed, nn

from megakit.testing import Ranks
from tests.docs.pages import blocks, read_page
from tests.scripts import REPOSITORY, read_csv, run_python, run_script


def test_datasets() -> None:
    """The blocks run in their order, as one program."""
    program = "\n".join(blocks(read_page("docs/datasets.md"), "python"))
    assert program.count("\nclass ") > 1
    exec(program, {"__name__": "datasets_md"})


@pytest.mark.long
def test_parallelism(ranks: Ranks) -> None:
    on_ranks, on_fake_ranks = blocks(read_page("docs/parallelism.md"), "python")
    names: dict[str, Any] = {"__name__": "example"}
    exec(on_ranks, names)
    names["test_every_rank_has_half"](ranks)
    # In a process of its own, which has not used Megatron yet.
    run_python("-c", f"{on_fake_ranks}\ntest_a_rank_of_1024()\n").output()


@pytest.mark.usefixtures("megatron")
def test_porting() -> None:
    """The imports of its table, which show where the names of the documents are."""
    page = read_page("docs/porting.md")
    table = page.partition("<!-- names: begin -->")[2].partition("<!-- names: end -->")[0]
    cells = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")]
    imports = {code for cell in cells for code in re.findall(r"`((?:from|import) [^`]+)`", cell)}
    assert len(imports) > 15
    for code in sorted(imports):
        exec(code, {})


class Autoencoder(nn.Module):
    """The model of ladder/1_torch.py, whose file trains when it is imported."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(784, 64), nn.Linear(64, 3)
        self.linear3, self.linear4 = nn.Linear(3, 64), nn.Linear(64, 784)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear2(self.linear1(x).relu())
        return cast(Tensor, self.linear4(self.linear3(z).relu()))


def go_on_with_fsdp2(code: str, folder: Path, step: int, steps: int) -> dict[int, float]:
    """Continues a pretraining on the digits by torch alone; returns the losses by step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from mnist.samples import LadderOptions, TrainingSamples

    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model = Autoencoder()
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    groups = [
        {"params": [one for one in model.parameters() if one.dim() == size], "weight_decay": decay}
        for size, decay in ((2, 0.01), (1, 0.0))
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    exec(code, {"torch": torch, "model": model, "adam": adam, "folder": folder, "step": step})
    samples = TrainingSamples(LadderOptions(dataset="digits"), num_samples=128 * steps, seed=42)
    losses, size, warmup = {}, 128 // ranks, steps // 10
    for done in range(step, steps):
        for group in adam.param_groups:  # cosine annealing
            angle = math.pi * (done - warmup) / (steps - warmup)
            group["lr"] = 2e-3 * (1 + math.cos(angle)) / 2
        first = done * 128 + rank * size
        corrupted, images = samples[first : first + size]
        loss = nn.functional.mse_loss(model(corrupted), images)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        distributed.all_reduce(mean := loss.detach() / ranks)
        losses[done + 1] = float(mean)
    return losses


@pytest.mark.long
def test_porting_to_fsdp2(ranks: Ranks, tmp_path: Path) -> None:
    """Weights and Adam's moments of a stopped run go on as the run itself does."""
    options = ("--dataset", "digits", "--precision", "32", "--max-steps", 400)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_script("model_pretrain.py", *options, "--output-dir", whole).output()
    command = ["model_pretrain.py", *options, "--save-interval", 200, "--output-dir", killed]
    checkpoint = killed / "pretrain/checkpoints/step=000200"
    with subprocess.Popen([sys.executable, *map(str, command)], cwd=REPOSITORY) as started:
        while not (checkpoint / "manifest.json").exists():
            assert started.poll() is None
            time.sleep(0.01)
        started.kill()
    blocks_of_page = blocks(read_page("docs/porting.md"), "python")
    (code,) = (block for block in blocks_of_page if "checkpoint_id" in block)
    arguments = (code, checkpoint / "weights", 200, 400)
    found = ranks.run(go_on_with_fsdp2, *arguments, world_size=2)[0]
    rows = [row for row in read_csv(whole / "pretrain/metrics.csv") if int(row["step"]) > 200]
    assert len(rows) == 20
    for row in rows:
        assert found[int(row["step"])] == pytest.approx(float(row["train_loss"]), rel=2e-6)
