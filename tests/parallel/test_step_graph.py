"""What a CUDA graph of the training step refuses, on a rehearsed GPU, and what has no graph.

tests/rehearsal/test_chain.py compares graphs with steps by Python, and tests/gpu does it on a GPU.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import REPOSITORY, Result, read_json, rehearsed, run_python, run_script

pytestmark = pytest.mark.long

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
    "dropout": ("parts.nn.ReLU = lambda: parts.nn.Dropout(0.1)", "each step has random numbers"),
    "a hook": (
        """
class Hook(parts.pl.Callback):
    def on_before_optimizer_step(self, *args):
        pass
build = trainers.build_trainer
trainers.build_trainer = lambda run, callbacks=(): build(run, [*callbacks, Hook()])
""",
        "a hook sees the gradients",
    ),
    "overlap": (
        """
config = trainers.DistributedDataParallelConfig
trainers.DistributedDataParallelConfig = lambda **o: config(**{**o, "overlap_grad_reduce": True})
""",
        "gradients or weights are sent while the model computes",
    ),
    "another optimizer": (
        """
from megakit.nemo import optimizer
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
build = trainers.build_trainer
trainers.build_trainer = lambda run, callbacks=(): build(run, [*callbacks, Change()])

from megakit.nemo import cuda_graph as step_graph
read = step_graph.next_batch
def next_batch(*args):
    batch = read(*args)
    return dict(reversed(batch.items())) if changed else batch
step_graph.next_batch = next_batch
"""
REFUSED |= {
    what: (CHANGING.format(change=change), f"{what} changed since the step was captured")
    for what, change in CHANGES.items()
}
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
WRONG_STEPS = (2, 7)  # by Python, and in the graph

#: Starts the script once for each change, in forks: the frameworks are imported once.
FORKS = """
import json, os, runpy, sys
import model_components as parts
import model_trainer as trainers

folder, changes, *arguments = sys.argv[1:]
for number, change in enumerate(json.loads(changes)):
    sys.argv = [*arguments, "--output-dir", f"{folder}/{number}"]
    if os.fork() == 0:
        os.dup2(os.open(f"{folder}/{number}.txt", os.O_CREAT | os.O_WRONLY), 2)
        exec(change)
        runpy.run_path(sys.argv[0], run_name="__main__")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
#: A script of its own, which the launcher starts in each rank.
PROGRAM = """
import model_components as parts
import model_trainer as trainers
import model_pretrain as script
{change}
if __name__ == "__main__":
    script.run_script(script.PRETRAIN, script.PretrainOptions, script.pretrain)
"""
SHORT = (
    *("--accelerator", "gpu", "--dataset", "digits", "--global-batch-size", 128),
    *("--max-steps", 8, "--val-interval", 8, "--save-interval", 8),
)


def start(folder: Path, change: str, *options: object, **variables: Any) -> Result:
    """Starts the script on rehearsed GPUs, with a graph, and with changed parts in each rank."""
    program = folder.with_suffix(".py")
    program.write_text(PROGRAM.format(change=change))
    given = (program, *SHORT, "--output-dir", folder, *options)
    changes = rehearsed(2, folder / "report", REHEARSE_GRAPH="1") | variables
    return run_python(*given, cwd=REPOSITORY, **changes)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, Path]]:
    """By name of a change: the status of a start, what it said, and its folder."""
    changes = {name: change for name, (change, _) in REFUSED.items()}
    changes |= {f"step {n}": GOES_WRONG.format(step=n) for n in WRONG_STEPS}
    folder = tmp_path_factory.mktemp("forks")
    given = json.dumps([*changes.values()])
    how = rehearsed(1, REHEARSE_GRAPH="1")
    done = run_python(
        "-c", FORKS, folder, given, "model_pretrain.py", *SHORT, cwd=REPOSITORY, **how
    )
    statuses = map(int, done.output().split())
    return {
        name: (status, (folder / f"{n}.txt").read_text(), folder / str(n))
        for n, (name, status) in enumerate(zip(changes, statuses, strict=True))
    }


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_graph_cannot_repeat_is_refused(ends: Any, what: str) -> None:
    status, told, _ = ends[what]
    assert status == 2, told
    (line,) = [line for line in told.splitlines() if "cuda_graph=True" in line]
    assert re.search(f"cannot repeat this training step, because {REFUSED[what][1]}", line), line
    assert line.endswith("Leave cuda_graph out.")


@pytest.mark.parametrize("step", WRONG_STEPS)
def test_a_norm_that_is_not_finite_is_named_before_a_save(ends: Any, step: int) -> None:
    """The norms are read later than they are computed, by Python or by the graph."""
    status, told, folder = ends[f"step {step}"]
    assert status == 1, told
    assert f"Step {step}: the gradient's norm is inf. Earlier checkpoints are" in told
    assert not [*folder.glob("pretrain/checkpoints/*")]


@pytest.mark.parametrize(
    ("script", "options", "reason"),
    [
        (
            "model_pretrain.py",
            (*SHORT, "--devices", 2, "--pipeline-parallel", 2),
            "pipeline stages wait for each other",
        ),
        (
            "examples/gpt/model_pretrain.py",
            ("--accelerator", "gpu", "--max-steps", 4),
            "Megatron reads the number of tokens from the GPU",
        ),
    ],
)
def test_other_jobs_are_refused(
    tmp_path: Path, script: str, options: tuple[object, ...], reason: str
) -> None:
    changes = rehearsed(2, REHEARSE_GRAPH="1")
    done = run_script(script, *options, "--output-dir", tmp_path, **changes)
    assert done.status == 2, done.err
    assert f"because {reason}. Leave cuda_graph out." in done.err


def test_without_megakits_patches_there_is_no_graph(tmp_path: Path) -> None:
    start(tmp_path, "", MEGAKIT_STOCK="1").output()
    (report,) = map(read_json, (tmp_path / "report").iterdir())
    assert report["launches"] == 0


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
build = trainers.build_trainer
trainers.build_trainer = lambda run, callbacks=(): build(run, [*callbacks, Weight()])
"""


BATCH_NORM = """
relu = parts.nn.ReLU
parts.nn.ReLU = lambda: parts.nn.Sequential(parts.nn.BatchNorm1d(64), relu())
"""


def test_a_loss_weight_and_running_statistics_are_followed(tmp_path: Path) -> None:
    tables = []
    for name, changes in (("python", {"REHEARSE_GRAPH": None}), ("graph", {})):
        options = ("--val-interval", 4, "--devices", 2)
        start(tmp_path / name, WEIGHTED + BATCH_NORM, *options, **changes).output()
        tables.append((tmp_path / name / "pretrain" / "metrics.csv").read_bytes())
    assert tables[0] == tables[1]
