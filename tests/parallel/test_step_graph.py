"""What a CUDA graph of the training step refuses, on a rehearsed GPU, and what has no graph.

tests/rehearsal/test_chain.py compares graphs with steps by Python, and tests/gpu does it on a GPU.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import Result, read_json, rehearsed, run_python, run_script

#: Code that changes the tutorial's parts, and the reason of the refusal.
REFUSED = {
    "a value is read": (
        """
report = parts.MSELossReduction.report
def read(self, *args, **values):
    loss, told = report(self, *args, **values)
    return loss * (1 if loss.item() > 0 else 2), told
parts.MSELossReduction.report = read
""",
        r"it may read a value from the GPU \(CUDA error: operation not permitted",
    ),
    "a value is logged": (
        """
class Module(parts.BionemoLightningModule):
    def training_step(self, batch, batch_idx=None):
        self.log("seen", 1.0)
        return self(batch)
parts.BionemoLightningModule = Module
""",
        "training_step logs values",
    ),
    "dropout": ("parts.nn.ReLU = lambda: parts.nn.Dropout(0.1)", "each step of dropout has a seed"),
    "a hook": (
        """
class Hook(parts.pl.Callback):
    def on_before_optimizer_step(self, *args):
        pass
build = parts.build_trainer
parts.build_trainer = lambda run, callbacks=(): build(run, [*callbacks, Hook()])
""",
        "a hook sees the gradients",
    ),
    "overlap": (
        """
config = parts.DistributedDataParallelConfig
parts.DistributedDataParallelConfig = lambda **o: config(**{**o, "overlap_grad_reduce": True})
""",
        "gradients or weights are sent while the model computes",
    ),
    "another optimizer": (
        """
from megakit.training import optimizer
config = optimizer.OptimizerConfig
optimizer.OptimizerConfig = lambda **o: config(**{**o, "optimizer": "sgd"})
""",
        "the optimizer is not FusedAdam",
    ),
    "float16": (
        """
plugin = parts.nl.MegatronMixedPrecision
parts.nl.MegatronMixedPrecision = lambda precision: plugin(precision="16-mixed")
""",
        "float16 reads from the GPU",
    ),
}
PROGRAM = """
import runpy, sys
import model_components as parts
{change}
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SHORT = ("--dataset", "digits", "--global-batch-size", 128, "--max-steps", 8)


def start(folder: Path, change: str, *options: object, **variables: Any) -> Result:
    given = (*SHORT, "--accelerator", "gpu", "--output-dir", folder, *options)
    program = PROGRAM.format(change=change)
    changes = rehearsed(2, folder / "report", REHEARSE_GRAPH="1") | variables
    return run_python("-c", program, "model_pretrain.py", *given, **changes)


@pytest.mark.long
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_graph_cannot_repeat_is_refused(tmp_path: Path, what: str) -> None:
    change, reason = REFUSED[what]
    done = start(tmp_path, change)
    assert done.status == 2, done.err
    (line,) = [line for line in done.err.splitlines() if "cuda_graph=True" in line]
    assert re.search(f"cannot repeat this training step, because {reason}", line), line
    assert line.endswith("Leave cuda_graph out.")


@pytest.mark.long
def test_pipeline_stages_are_refused(tmp_path: Path) -> None:
    layout = ("--devices", 2, "--pipeline-parallel", 2, "--output-dir", tmp_path)
    changes = rehearsed(2, REHEARSE_GRAPH="1")
    done = run_script("model_pretrain.py", *SHORT, "--accelerator", "gpu", *layout, **changes)
    assert done.status == 2, done.err
    assert "because pipeline stages wait for each other. Leave cuda_graph out." in done.err


@pytest.mark.long
def test_losses_that_count_tokens_are_refused(tmp_path: Path) -> None:
    options = ("--max-steps", 4, "--accelerator", "gpu", "--output-dir", tmp_path)
    changes = rehearsed(1, REHEARSE_GRAPH="1")
    done = run_script("examples/gpt/model_pretrain.py", *options, **changes)
    assert done.status == 2, done.err
    assert "because Megatron reads the number of tokens from the GPU. Leave" in done.err


@pytest.mark.long
@pytest.mark.parametrize(("variable", "launches"), [("MEGAKIT_STOCK", 0), ("UNUSED", 5)])
def test_without_megakits_patches_there_is_no_graph(
    tmp_path: Path, variable: str, launches: int
) -> None:
    changes = rehearsed(1, tmp_path / "report", REHEARSE_GRAPH="1", **{variable: "1"})
    given = (*SHORT, "--accelerator", "gpu", "--output-dir", tmp_path)
    run_script("model_pretrain.py", *given, **changes).output()
    (report,) = map(read_json, (tmp_path / "report").iterdir())
    assert report["launches"] == launches


#: In the step of this number, the gradient is infinite.
GOES_WRONG = """
import torch
report, counts = parts.MSELossReduction.report, []
def wrong(self, *args, **values):
    loss, told = report(self, *args, **values)
    if not counts:
        counts.append(torch.zeros((), device="cuda"))
    counts[0].add_(1)
    return loss * torch.where(counts[0] == {step}, 1e30, 1.0), told
parts.MSELossReduction.report = wrong
"""


@pytest.mark.long
@pytest.mark.parametrize("step", [2, 7])
def test_a_norm_that_is_not_finite_is_named_before_a_save(tmp_path: Path, step: int) -> None:
    """The norms are read later than they are computed, by Python or by the graph."""
    change = GOES_WRONG.format(step=step)
    done = start(tmp_path, change, "--save-interval", 8, "--val-interval", 8)
    assert done.status == 1
    assert f"Step {step}: the gradient's norm is inf. Earlier checkpoints are" in done.err
    checkpoints = tmp_path / "pretrain" / "checkpoints"
    assert not checkpoints.exists() or not [*checkpoints.iterdir()]


#: What changes after the capture, by what the refusal names.
CHANGES = {
    "the optimizer's options": "trainer.optimizers[0].param_groups[0]['weight_decay'] = 0.5",
    "the optimizer's state": "adam.load_state_dict(adam.state_dict())",
    "the choice of trained weights": "next(module.parameters()).requires_grad = False",
    "the form of the batches": "changed.append(True)",
}
CHANGING = """
changed = []
class Change(parts.pl.Callback):
    def on_train_batch_start(self, trainer, module, *args):
        if trainer.global_step == 5:
            adam = trainer.optimizers[0].mcore_optimizer.chained_optimizers[0].optimizer
            {change}
build = parts.build_trainer
parts.build_trainer = lambda run, callbacks=(): build(run, [*callbacks, Change()])

from megakit.training import cuda_graph as step_graph
read = step_graph.next_batch
def next_batch(*args):
    batch = read(*args)
    return dict(reversed(batch.items())) if changed else batch
step_graph.next_batch = next_batch
"""


@pytest.mark.long
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_that_a_graph_cannot_follow_is_refused(tmp_path: Path, what: str) -> None:
    done = start(tmp_path, CHANGING.format(change=CHANGES[what]))
    assert done.status == 2, done.err
    assert f"because {what} changed since the step was captured. Leave" in done.err


#: A weight of the loss in a tensor, which a callback changes in place.
WEIGHTED = """
import torch
report = parts.MSELossReduction.report
class Weight(parts.pl.Callback):
    value = None
    def on_train_batch_start(self, trainer, *args):
        if Weight.value is None:
            Weight.value = torch.zeros((), device="cuda")
        Weight.value.fill_(1 + trainer.global_step)
def weighted(self, *args, **values):
    loss, told = report(self, *args, **values)
    return loss * (1.0 if Weight.value is None else Weight.value), told
parts.MSELossReduction.report = weighted
build = parts.build_trainer
parts.build_trainer = lambda run, callbacks=(): build(run, [*callbacks, Weight()])
"""


BATCH_NORM = """
relu = parts.nn.ReLU
parts.nn.ReLU = lambda: parts.nn.Sequential(parts.nn.BatchNorm1d(64), relu())
"""


@pytest.mark.long
@pytest.mark.parametrize(("change", "devices"), [(WEIGHTED, 1), (BATCH_NORM, 2)], ids=["1", "2"])
def test_a_loss_weight_and_running_statistics_are_followed(
    tmp_path: Path, change: str, devices: int
) -> None:
    tables = []
    for name, changes in (("python", {"REHEARSE_GRAPH": None}), ("graph", {})):
        options = ("--val-interval", 4, "--devices", devices)
        start(tmp_path / name, change, *options, **changes).output()
        tables.append((tmp_path / name / "pretrain" / "metrics.csv").read_bytes())
    assert tables[0] == tables[1]
