"""What a CUDA graph of the training step refuses, on a rehearsed GPU, and what has no graph.

tests/rehearsal/test_chain.py compares graphs with steps by Python, and tests/gpu does it on a GPU.
"""

from pathlib import Path

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
        "the step may read a value from the GPU",
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
        "FusedAdam is not used",
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


def start(folder: Path, change: str, *options: object) -> Result:
    given = (*SHORT, "--accelerator", "gpu", "--output-dir", folder, *options)
    program = PROGRAM.format(change=change)
    changes = rehearsed(2, folder / "report", REHEARSE_GRAPH="1")
    return run_python("-c", program, "model_pretrain.py", *given, **changes)


@pytest.mark.long
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_graph_cannot_repeat_is_refused(tmp_path: Path, what: str) -> None:
    change, reason = REFUSED[what]
    done = start(tmp_path, change)
    assert done.status == 2, done.err
    (line,) = [line for line in done.err.splitlines() if "cuda_graph=True" in line]
    assert f"cannot repeat this training step, because {reason}" in line
    assert line.endswith("Leave cuda_graph out.")


@pytest.mark.long
def test_pipeline_stages_are_refused(tmp_path: Path) -> None:
    layout = ("--devices", 2, "--pipeline-parallel", 2, "--output-dir", tmp_path)
    changes = rehearsed(2, REHEARSE_GRAPH="1")
    done = run_script("model_pretrain.py", *SHORT, "--accelerator", "gpu", *layout, **changes)
    assert done.status == 2, done.err
    assert "because pipeline stages wait for each other. Leave cuda_graph out." in done.err


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


#: The weight decay changes at each step.
CHANGING_DECAY = """
class Decay(parts.pl.Callback):
    def on_train_batch_start(self, trainer, *args):
        for group in trainer.optimizers[0].param_groups:
            group["weight_decay"] = 0.01 * (1 + trainer.global_step)
build = parts.build_trainer
parts.build_trainer = lambda run, callbacks=(): build(run, [*callbacks, Decay()])
"""


@pytest.mark.long
def test_an_option_of_the_optimizer_that_changes_is_refused(tmp_path: Path) -> None:
    done = start(tmp_path, CHANGING_DECAY)
    assert done.status == 2, done.err
    assert "because the optimizer's options change, and not only the learning rate." in done.err
