"""What the pool's ranks run of `examples/gpt`: its scripts' own work, and what came of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megakit.job.layout import Layout
from tests.parallel import jobs

TEXT = Path(__file__).parents[2] / "LICENSE"
GLOBAL_BATCH = 8
STEPS = 20
SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "block_size": 16}


@dataclass(frozen=True)
class Case:
    """A layout, and what else changes the memory or the communication."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    recompute: bool = False
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False
    dropout: float = 0.0
    precision: Literal["32", "bf16-mixed"] = "32"
    strategy: tuple[tuple[str, Any], ...] = ()  # further arguments of the strategy

    @property
    def layout(self) -> Layout:
        world_size = self.tensor * self.pipeline * self.data
        micro = GLOBAL_BATCH // self.data // 2
        return Layout(world_size, 1, self.tensor, self.pipeline, GLOBAL_BATCH, micro)

    @property
    def options(self) -> dict[str, Any]:
        names = ("recompute", "sequence_parallel", "distributed_optimizer", "dropout", "precision")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Trained:
    """What one rank saw: the losses of the steps, on the last stage, and its weights."""

    losses: list[float]
    weights: dict[str, np.ndarray]
    checkpoint: str


def train(case: Case, folder: Path, resume: str | None = None) -> Trained:
    """`model_pretrain.py` for 20 steps, with a checkpoint after 10; or from one of those on."""
    import lightning.pytorch as pl
    from megatron.core import parallel_state

    from examples.gpt.model_pretrain import PRETRAIN, PretrainOptions, pretrain
    from megakit.training import train as fit

    half = STEPS // 2
    # The step of the first checkpoint is not validated, so the save itself has to gather weights.
    intervals = {"max_steps": STEPS, "val_interval": 7, "save_interval": half}
    sizes: dict[str, Any] = {**SIZES, **intervals, **case.options}
    options = PretrainOptions(
        output_dir=folder,
        text=TEXT,
        lr=5e-3,
        global_batch_size=GLOBAL_BATCH,
        **sizes,
    )
    run = jobs.make_run(
        PRETRAIN, options, case.layout, resume=resume, dataset=options.fingerprint()
    )
    losses: list[float] = []
    kept = folder / "kept" / f"step={half:06}"  # the run keeps its last and its best one

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            if parallel_state.is_pipeline_last_stage():
                losses.append(float(outputs["loss"]))
            if run.is_main and trainer.global_step == half + 1 and resume is None:
                shutil.copytree(run.path / "checkpoints" / kept.name, kept)

        def __deepcopy__(self, memo: object) -> Watch:
            return self  # NeMo copies callbacks in order to record them

    module, data, trainer = jobs.built_by(pretrain, run)
    if case.overlap:
        further = ["overlap_param_gather"] if case.distributed_optimizer else []
        jobs.use_ddp(trainer, ["overlap_grad_reduce", *further])
    vars(trainer.strategy).update(case.strategy)
    trainer.callbacks.append(Watch())
    fit(model=module, data=data, trainer=trainer, resume=resume)
    return Trained(losses, jobs.weights_of(module), str(kept))


def metadata_of(checkpoint: str) -> dict[str, Any]:
    """What Megatron wrote about the format of a checkpoint."""
    from megatron.core import dist_checkpointing

    metadata: dict[str, Any] = dist_checkpointing.load_content_metadata(
        str(Path(checkpoint, "weights"))
    )
    return metadata


def sample(case: Case, folder: Path, checkpoint: str) -> str:
    """`model_sample.py`; the path of the text, which rank 0 writes."""
    from examples.gpt.model_sample import SAMPLE, SampleOptions, sample

    options = SampleOptions(output_dir=folder, precision="32", num_bytes=50, prompt="The ")
    run = jobs.make_run(SAMPLE, options, case.layout, start=checkpoint, dataset="text")
    return str(sample(run))


def sample_of_the_plain_model(checkpoint: str) -> bytes:
    """The same text, by a model outside of Megatron's parallelism."""
    import torch

    from megakit.testing import distributed_model_parallel_state

    with distributed_model_parallel_state():
        from examples.gpt import gpt_components as gpt_components  # the checkpoint names its config
        from examples.gpt.sampling import NextLogits, generate
        from megakit.models import load_for_inference

        prompt = torch.tensor([list(b"The ")])
        model = load_for_inference(checkpoint)
        tokens = generate(NextLogits(model, 1), prompt, 50, temperature=0.7, top_k=50, seed=42)
        return bytes(tokens[0].tolist())
