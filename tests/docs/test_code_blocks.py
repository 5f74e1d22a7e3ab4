"""The Python code that pages show runs: data.md and porting.md."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megakit.models import load_for_inference
from tests.docs.pages import blocks, read_page
from tests.scripts import run_script


def test_data() -> None:
    """The blocks run in their order, as one program."""
    program = "\n".join(blocks(read_page("docs/data.md"), "python"))
    assert program.count("\nclass ") > 1
    exec(program, {"__name__": "data_md"})


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


@pytest.mark.long
@pytest.mark.usefixtures("megatron")
def test_porting_to_fsdp2(tmp_path: Path) -> None:
    """torch alone reads a checkpoint into a sharded model and AdamW, as megakit does."""
    from model_components import PretrainConfig

    sizes = {"linear1": (784, 64), "linear2": (64, 3), "linear3": (3, 64), "linear4": (64, 784)}
    options = ("--dataset", "digits", "--precision", "32", "--max-steps", 7)
    done = run_script("model_pretrain.py", *options, "--output-dir", tmp_path)
    folder = Path(done.output().strip())
    (code,) = (one for one in blocks(read_page("docs/porting.md"), "python") if "MCoreMeta" in one)
    model: Any = nn.Sequential()
    for name, size in sizes.items():
        model.add_module(name, nn.Linear(*size))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    adam = torch.optim.AdamW(model.parameters())
    exec(code, dict(torch=torch, model=model, adam=adam, folder=folder / "weights", step=7))
    expected = load_for_inference(folder, PretrainConfig()).state_dict()
    assert len(expected) == 8
    for name, weight in model.named_parameters():
        assert weight.full_tensor().equal(expected[name])
        state = adam.state[weight]
        assert state["step"] == 7
        saved = {f"optimizer.state.exp_avg.module.{name}": torch.empty(weight.shape)}
        load(saved, checkpoint_id=folder / "weights", no_dist=True)
        assert state["exp_avg"].full_tensor().equal(*saved.values())
        assert float(state["exp_avg_sq"].full_tensor().min()) >= 0
