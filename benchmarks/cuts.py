"""What each change to the stack is worth: steps with and without it by turns, in one process.

    python benchmarks/cuts.py --data-dir PATH [--steps N] [--starts N] [--write]

Pretraining in micro batches of 128, bf16-mixed. Every 40 steps the change is undone or made again;
what is compared are neighbours, by the processor's time, so that a machine whose speed swings tells
the same. Two comparisons need processes by turns: prefetching, which can't be undone while a loader
is read (by the wall clock, since a thread uses another core), and the start, which is imports with
and without each change. `--write` puts both tables into RESULTS.md.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from report import HEADER, REPOSITORY, Row, machine, write_section

BLOCK, WARM_UP = 40, 200

#: How a change is undone: attributes of modules, classes or objects, and what they were before.
Undo = list[tuple[Any, str, Any]]


def logging(trainer: Any) -> Undo:
    """NeMo logs five values per step, and the learning rate, through Lightning"""
    from nemo import lightning as nl
    from nemo.lightning.pytorch.optim import MegatronOptimizerModule

    from megakit.training.optimizer import LeanOptimizerModule
    from megakit.training.strategy import ExactStrategy

    return [
        (ExactStrategy, "training_step", nl.MegatronStrategy.training_step),
        (ExactStrategy, "optimizer_step", nl.MegatronStrategy.optimizer_step),
        (
            LeanOptimizerModule,
            "on_train_batch_start",
            MegatronOptimizerModule.on_train_batch_start,
        ),
    ]


def schedule(trainer: Any) -> Undo:
    """NeMo's MegatronParallel calls Megatron's schedule, with callbacks and look-ups per step"""
    from megakit.training import strategy

    return [(strategy, "is_stock", lambda: True)]


def collectives(trainer: Any) -> Undo:
    """gloo computes the sums over groups of only one rank"""
    from megatron.core.tensor_parallel import layers
    from torch import distributed

    regions = "copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region"
    return [
        (distributed, "all_reduce", distributed.all_reduce.__wrapped__),  # type: ignore[attr-defined]
        *((layers, name, getattr(layers, name).__wrapped__) for name in regions),
    ]


def linear(trainer: Any) -> Undo:
    """Megatron's own matrix product also computes the gradient of the images"""
    from megatron.core.tensor_parallel.layers import (
        linear_with_grad_accumulation_and_async_allreduce,
    )

    from megakit.models.layers import _Linear

    def product(self: Any, input: Any, weight: Any, **options: Any) -> Any:
        return linear_with_grad_accumulation_and_async_allreduce(input, weight, **options)

    return [(_Linear, "_forward_impl", product)]


def adam(trainer: Any) -> Undo:
    """torch's Adam updates each weight separately"""
    import torch

    inner = trainer.strategy.optimizers[0].mcore_optimizer.chained_optimizers[0].optimizer
    plain = torch.optim.AdamW([dict(group) for group in inner.param_groups])

    def step() -> None:
        for own, group in zip(plain.param_groups, inner.param_groups, strict=True):
            own["lr"] = group["lr"]  # changes from step to step
        plain.step()

    return [(inner, "step", step)]


STEP_CUTS: dict[str, Callable[[Any], Undo]] = {
    function.__name__: function for function in (logging, collectives, linear, adam, schedule)
}
START_CUTS = {
    "torchmetrics": "torchmetrics imports scipy.signal and torchvision",
    "jit_fuser": "torch.compile compiles Megatron's fused functions",
    "collector": "Python's garbage collector runs during imports",
}


def timed_steps(cut: str, out: Path, num_steps: int) -> None:
    """Runs `model_pretrain.py` in this process, undoing the change for every other block."""
    sys.path.insert(0, str(REPOSITORY))
    from megakit.job import script
    from megakit.runtime.accelerator import use_accelerator

    def use_and_time(name: Any) -> None:
        use_accelerator(name)
        from megakit.training.loop import StepLoop as Loop

        advance = Loop.advance
        state: dict[str, Any] = {"step": 0, "undone": False, "began": 0.0}
        times: dict[bool, list[float]] = {False: [], True: []}
        changed: list[tuple[Any, str, Any, bool]] = []

        def timed_advance(self: Any, *args: Any) -> None:
            state["step"] += 1
            if state["step"] % BLOCK == 0:
                now = time.process_time()
                if state["step"] > WARM_UP:
                    times[state["undone"]].append(1000 * (now - state["began"]) / BLOCK)
                switch(self.trainer)
                state["began"] = time.process_time()
            advance(self, *args)
            if state["step"] == num_steps:
                out.write_text(json.dumps([times[False], times[True]]))

        def switch(trainer: Any) -> None:
            state["undone"] = not state["undone"]
            if state["undone"]:
                for owner, name, value in STEP_CUTS[cut](trainer):
                    had = name in vars(owner)
                    changed.append((owner, name, vars(owner).get(name), had))
                    setattr(owner, name, value)
                return
            while changed:
                owner, name, value, had = changed.pop()
                setattr(owner, name, value) if had else delattr(owner, name)

        setattr(Loop, "advance", timed_advance)  # noqa: B010

    vars(script)["use_accelerator"] = use_and_time
    pretrain()


def pretrain_with(prefetching: bool) -> NoReturn:
    """Runs `model_pretrain.py`; without prefetching, each step fetches its own batch."""
    sys.path.insert(0, str(REPOSITORY))
    from megakit.data import loader

    if not prefetching:
        vars(loader)["can_be_prefetched"] = lambda dataset: False
    pretrain()


def pretrain() -> NoReturn:
    """Runs `model_pretrain.py` with this process's options, and ends the process."""
    import model_pretrain
    from megakit.job.script import run_script

    sys.argv[0] = str(REPOSITORY / "model_pretrain.py")
    run_script(model_pretrain.PRETRAIN, model_pretrain.PretrainOptions, model_pretrain.pretrain)


def timed_start(cut: str) -> None:
    """Imports the stack as the scripts do, all but one change made; prints processor seconds."""
    sys.path.insert(0, str(REPOSITORY))
    from megakit.runtime import cpu, deferred, memory
    from megakit.runtime.accelerator import use_accelerator

    if cut == "torchmetrics":
        deferred.NAMES = ()
    if cut == "jit_fuser":
        vars(cpu)["disable_jit_fuser"] = lambda: None
    if cut != "collector":
        memory.suspend_collector()
    use_accelerator("cpu")
    import model_components  # noqa: F401

    print(time.process_time())
    sys.stdout.flush()
    os._exit(0)


def run(*arguments: object) -> str:
    """Runs this file in another process; returns all that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{arguments} failed:\n{done.stderr[-4000:]}")
    return done.stderr + done.stdout


def step_row(cut: str, data_dir: Path, num_steps: int) -> Row:
    """What a change takes off a step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times")
        options: list[object] = ["--data-dir", data_dir, "--output-dir", folder]
        options += ["--max-steps", num_steps + 1, "--global-batch-size", 128]
        options += ["--val-interval", num_steps + 1, "--save-interval", num_steps + 1]
        run("--steps-of", cut, out, num_steps, *options)
        made, undone = json.loads(out.read_text())
    gains = [b - a for a, b in zip(made, undone, strict=False)]
    share = statistics.median(gains) / statistics.median(undone)
    what = (STEP_CUTS[cut].__doc__ or "").strip()
    return Row(what, quartiles(gains), "ms", f"{share:.0%} of a step without the change")


def prefetch_row(data_dir: Path, starts: int) -> Row:
    """What it takes off a step that a thread prefetches several batches at once."""
    gains, undone = [], []
    for _ in range(starts):
        times = []
        for prefetching in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                options = ["--data-dir", data_dir, "--output-dir", folder, "--accelerator", "cpu"]
                printed = run("--prefetching", prefetching, *options)
            times.append(1000 / float(re.findall(r"([0-9.]+) steps/s", printed)[-1]))
        gains.append(times[1] - times[0])
        undone.append(times[1])
    share = statistics.median(gains) / statistics.median(undone)
    what = "each step fetches its own batch, without prefetching"
    return Row(what, gains, "ms", f"{share:.0%} of a step without the change")


def quartiles(values: list[float]) -> list[float]:
    """The middle half of the values, as its ends and its middle."""
    return statistics.quantiles(values, n=4)


def start_rows(starts: int) -> list[Row]:
    """What each change takes off the start."""
    seconds: dict[str, list[float]] = {cut: [] for cut in ("none", *START_CUTS)}
    for _ in range(starts):
        for cut, times in seconds.items():
            times.append(float(run("--start-of", cut).splitlines()[-1]))
    rows = [Row("imports with all changes", seconds["none"], "s")]
    for cut, what in START_CUTS.items():
        gains = [b - a for a, b in zip(seconds["none"], seconds[cut], strict=True)]
        rows.append(Row(what, gains, "s", "saved"))
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--steps-of"]:
        cut, out, num_steps = sys.argv[2:5]
        del sys.argv[1:5]
        timed_steps(cut, Path(out), int(num_steps))
    if sys.argv[1:2] == ["--start-of"]:
        timed_start(sys.argv[2])
    if sys.argv[1:2] == ["--prefetching"]:
        del sys.argv[1]
        pretrain_with(prefetching=sys.argv.pop(1) == "True")
    parser = argparse.ArgumentParser(description="What each change to the stack is worth.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--steps", type=int, default=4000, help="steps for each change")
    parser.add_argument("--starts", type=int, default=5, help="starts for each change")
    parser.add_argument("--write", action="store_true", help="put the tables into RESULTS.md")
    options = parser.parse_args()
    rows = [step_row(cut, options.data_dir, options.steps) for cut in STEP_CUTS]
    rows.append(prefetch_row(options.data_dir, options.starts))
    rows.sort(key=lambda row: -row.median)
    title = "## What each change to the stack is worth"
    parts = [
        *(title, "", machine("nemo_toolkit", "megatron-core"), ""),
        "A row names what the frameworks do without a change. The median is the time that the "
        "change saves per training step; the spread is the middle half of the values.",
        *("", *HEADER, *map(str, rows), ""),
        "Processor time of the imports with all changes, and the time that each change saves:",
        *("", *HEADER),
        *map(str, start_rows(options.starts)),
    ]
    text = "\n".join(parts)
    print(text)
    if options.write:
        write_section("cuts", text)


if __name__ == "__main__":
    main()
