"""`./run check`: planted faults are named, right programs are right; all steps are real."""

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import REPOSITORY, run

AUTOENCODER, GPT = "ladder/3_megatron.py", "ladder/gpt/3_megatron.py"
#: What is replaced in a program, by what, the layout that shows it, and what is said.
FAULTS = {
    "gradients are not averaged": (
        AUTOENCODER,
        "finalize_model_grads_func=finalize_model_grads",
        "**{}",
        "DP2",
        r"wrong: gradients\n    gradients, all: each data-parallel rank has its own, and nobody "
        r"averages it\n        linear4.bias ",
    ),
    "a weight is drawn by the rank": (
        AUTOENCODER,
        "seeded(SEED, name)",
        "seeded(SEED + distributed.get_rank(), name)",
        "TP2",
        r"wrong: weights\n    weights, ranks 0 and 1 have linear2.bias, and begin with different",
    ),
    "a weight that each rank has counts twice in the norm": (
        AUTOENCODER,
        "    return layer\n",
        "    layer.bias.tensor_model_parallel = True\n    return layer\n",
        "TP2",
        r"wrong: norm\n.*\n?.*whole on each rank, but `tensor_model_parallel` is set",
    ),
    "replicas read the same samples": (
        AUTOENCODER,
        "step * batch + rank * size",
        "step * batch",
        "DP2",
        r"wrong: samples\n    samples, ranks 0 and 1, of different replicas, read the",
    ),
    "a rank of a replica reads other samples": (
        AUTOENCODER,
        "samples[first : first + size]",
        "samples[(n := first + distributed.get_rank()) : n + size]",
        "TP2",
        r"wrong: samples\n    samples, ranks 0, 1 of one replica read different ones",
    ),
    "the gradient of the step before stays": (
        AUTOENCODER,
        "optimizer.zero_grad()",
        "pass",
        "MB4",
        r"`grad` is still the buffer `main_grad` \(no optimizer.zero_grad\(\)\)",
    ),
    "gradients add up": (
        AUTOENCODER,
        "model.zero_grad_buffer()",
        "pass",
        "MB4",
        r"`main_grad` is not zero \(no zero_grad_buffer\(\)\)",
    ),
    "torch's optimizer beside Megatron's buffers": (
        AUTOENCODER,
        "        optimizer.step()",
        "        torch.optim.Adam(model.parameters()).step()",
        "MB4",
        r"wrong: update\n    update, no weight changes",
    ),
    "a loss that counts ranks": (
        AUTOENCODER,
        "images)\n",
        "images) * distributed.get_world_size()\n",
        "DP2",
        r"wrong: loss\n    loss, .*\n    Usually: 2 is the number of data-parallel ranks\n"
        r"    After it, this is wrong, too: gradients, norm",
    ),
    "a loss that float32 would round": (
        AUTOENCODER,
        "images)\n",
        "images) * (1 + 1e-8 * distributed.get_world_size())\n",
        "DP2",
        "wrong: loss",
    ),
    "a whole gradient that is summed": (
        AUTOENCODER,
        "    buffers = D",
        "    config.sequence_parallel = model.linear4.bias.sequence_parallel = True\n"
        "    buffers = D",
        "TP2",
        r"gradients, 1 of 8: 2 times the right one\n        linear4.bias .*\n    Usually: each",
    ),
    "each rank clips by a norm of its own": (
        AUTOENCODER,
        "        optimizer.step()",
        "        for p in model.parameters():\n"
        "            p.main_grad /= sum(float(q.main_grad.norm()) for q in model.parameters())\n"
        "        optimizer.step()",
        "TP2",
        "gradients, right when the schedule ends, and wrong when the optimizer's step",
    ),
    "a layer that is wrong if it is sharded": (
        AUTOENCODER,
        "self.linear4(self.linear3(z)[0].relu())",
        "self.linear4(self.linear3(z * len(self.linear1.weight))[0].relu())",
        "TP2",
        "Usually: the forward pass: outputs are wrong from linear3 on",
    ),
    "a weight that is not used": (
        AUTOENCODER,
        "return self.linear4(self.linear3(z)[0].relu())[0]",
        "return self.linear4(self.linear3(z)[0].detach().relu())[0]",
        "MB4",
        r"wrong: gradients\n    gradients, no backward pass reaches 6 of 8 weights\n",
    ),
    "a micro batch that counts twice": (
        AUTOENCODER,
        "return model(corrupted), loss_function",
        "global number\n    number = globals().get('number', 0) + 1\n"
        "    output = model(corrupted)\n"
        "    return output * (1 + (number == 1)), loss_function",
        "MB4",
        "wrong: loss",
    ),
    "a learning rate by the rank": (
        AUTOENCODER,
        "init_lr=LR",
        "init_lr=LR * (1 + distributed.get_rank())",
        "DP2",
        r"wrong: update\n    update, of 8 of 8 weights\n        linear1.weight ",
    ),
    "a norm's gradient stays partial": (
        GPT,
        "norm.weight.sequence_parallel = config.sequence_parallel",
        "pass",
        "SP",
        r"wrong: gradients\n    gradients, 9 of 27: partial on each tensor-parallel rank, and "
        r"nobody sums it\n        decoder.final_layernorm.weight .*/3_megatron.py:123 from 188\n",
    ),
    "a mean is multiplied by the context-parallel ranks": (
        GPT,
        "if model.config.calculate_per_token_loss",
        "if False",
        "CP2",
        r"wrong: loss\n    loss, .*\n    Usually: 2 is the number of context-parallel ranks",
    ),
    "a mask that is off by one": (
        GPT,
        "visible = own[:, None]",
        "visible = (own + 1)[:, None]",
        "MB4",
        r"one process .*wrong: causality\n    causality, outputs of decoder.layers.0."
        r"self_attention.core_attention change with a later token",
    ),
}
SHORT = ("gradients are not averaged", "a norm's gradient stays partial")
#: A loop without Megatron's schedule.
LOOP = """
import sys, torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tools.record import record

distributed.init_process_group("gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
samples, labels = torch.randn(8, 16), torch.arange(8) % 4
if sys.argv[1] == "fsdp":
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
elif sys.argv[1] == "ddp":
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    with record(model) as step:
        step.read([samples[rank::ranks], labels[rank::ranks]])
        loss = nn.functional.cross_entropy(model(samples[rank::ranks]), labels[rank::ranks])
        loss.backward()
        step.loss(loss)
        optimizer.step()
    optimizer.zero_grad()
"""


def check(*arguments, cwd, **changes):
    changes = {"PYTHONPATH": str(REPOSITORY), **changes}
    return run(sys.executable, "-P", "-m", "tools.check", *arguments, cwd=cwd, **changes)


@pytest.mark.parametrize(
    "fault", [pytest.param(n, marks=() if n in SHORT else pytest.mark.long) for n in FAULTS]
)
def test_a_fault_is_named(tmp_path, fault):
    path, old, new, layout, told = FAULTS[fault]
    text = (REPOSITORY / path).read_text()
    assert text.count(old) == 1
    program = tmp_path / Path(path).name
    program.write_text(text.replace(old, new))
    data = ("--dataset", "digits") if path == AUTOENCODER else ()
    done = check(program, *data, "--layouts", layout, cwd=tmp_path)
    assert done.status == 1, done.out + done.err
    assert re.search(told, done.out), done.out


def verdicts(done):
    return {one["layout"]: one["verdict"] for one in json.loads(done.out)["layouts"]}


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--experts", "4")])
def test_a_right_gpt_is_right_under_all_layouts(tmp_path, options):
    """Two steps; the second begins with the weights of one process, too."""
    done = check(REPOSITORY / GPT, *options, "--steps", "2", "--json", cwd=tmp_path)
    assert done.status == 0, done.err
    found = verdicts(done)
    assert {*found.values()} <= {"right", "fails"}
    # Megatron refuses experts under tensor parallelism without sequence parallelism.
    fails = {name for name, verdict in found.items() if verdict == "fails"}
    assert all("TP2" in name for name in fails if options)
    assert options or not fails
    assert len(found) >= (16 if options else 14)


@pytest.mark.long
@pytest.mark.parametrize("stage", ["model_pretrain.py", "examples/megatron/model_pretrain.py"])
def test_the_scripts_are_right(tmp_path, stage):
    done = check(
        REPOSITORY / stage,
        "--dataset",
        "digits",
        "--layouts",
        "MB4,TP2,PP2,DP2,TP2xPP2",
        "--json",
        cwd=tmp_path,
    )
    assert done.status == 0, done.err
    assert [*verdicts(done).values()] == ["right"] * 6


@pytest.mark.long
@pytest.mark.parametrize(("wrapper", "told"), [("ddp", ""), ("fsdp", ""), ("none", "gradients")])
def test_a_loop_without_megatron(tmp_path, wrapper, told):
    (tmp_path / "loop.py").write_text(LOOP)
    done = check("loop.py", wrapper, "--layouts", "DP2", cwd=tmp_path)
    assert done.status == (1 if told else 0), done.err
    assert ("wrong: gradients" if told else "No layout is wrong.") in done.out


@pytest.mark.long
def test_data_may_end_with_the_step(tmp_path):
    """The check of causality would use the samples of the next one."""
    text, last = (REPOSITORY / GPT).read_text(), "else batches[0]"
    assert text.count(last) == 1
    (tmp_path / "gpt.py").write_text(text.replace(last, f"{last} if step == begin else iter(())"))
    assert check("gpt.py", "--layouts", "TP2", cwd=tmp_path).status == 0


def test_nothing_checked_is_not_success(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    done = check("loop.py", "ddp", "--max-ranks", "1", cwd=tmp_path)
    assert (done.status, done.out.splitlines()[-1]) == (1, "No layout was checked."), done.err


def test_what_is_refused(tmp_path):
    (tmp_path / "nothing.py").write_text("print('no step')")
    for arguments, told in (
        (("absent.py",), "absent.py: there is no such program."),
        (("nothing.py",), "nothing.py: makes fewer than 1 training steps by Megatron's schedule"),
        (("nothing.py", "--layouts", "TP2xTP4"), "layout TP2xTP4: expected kinds and sizes"),
        (("nothing.py", "--layout", "QQ=--tp {}"), "layout QQ: expected kinds and sizes"),
        (("nothing.py", "--layout", "TP"), "--layout TP: expected NAME=OPTIONS, such as 'TP=--tp"),
        (("nothing.py", "--steps", "0"), "--steps 0: has to be at least 1."),
    ):
        done = check(*arguments, cwd=tmp_path)
        assert (done.status, done.out) == (2, ""), done.err
        assert told in done.err


@pytest.mark.long
def test_the_tool_alone_on_the_newest_megatron(tmp_path, newest_venv):
    """Its wheel contains all that it imports; the environment has no NeMo."""
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    for name in ("tools", "megakit"):  # setuptools writes beside the sources
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    run(*command, "--wheel-dir", tmp_path, tmp_path / "tools").output()
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    (tmp_path / "loop.py").write_text(LOOP.replace("tools.record", "megatools.record"))
    own = (newest_venv / "bin/python", "-P", "-m", "megatools")
    changes: Any = {"PYTHONPATH": str(tmp_path / "installed")}
    for name in ("check", "compare", "trace"):
        run(*own, name, "--help", cwd=tmp_path, **changes).output()
    done = run(*own, "check", "loop.py", "ddp", "--layouts", "DP2", cwd=tmp_path, **changes)
    assert "No layout is wrong." in done.output()
