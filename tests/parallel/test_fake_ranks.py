"""Fake ranks hold what real ranks do.

The functions below run in the pool's processes.
"""

import importlib
from typing import Any

import pytest

from tests.parallel import jobs

LAYOUTS = {
    "tp2-pp2": {"world_size": 4, "tensor": 2, "pipeline": 2},
    "tp2-dp2": {"world_size": 4, "tensor": 2},
    "pp2-dp2": {"world_size": 4, "pipeline": 2},
}
CASES = [
    ("pretrain", "tp2-pp2", "32", False),
    pytest.param("pretrain", "pp2-dp2", "bf16-mixed", False, marks=pytest.mark.long),
    pytest.param("pretrain", "pp2-dp2", "32", True, marks=pytest.mark.long),
    pytest.param("finetune", "tp2-dp2", "32", False, marks=pytest.mark.long),
]


def builder(layout, folder, stage, precision, stages_first):
    """A function that builds a job; its ranks are in one of NeMo's two orders."""
    script = importlib.import_module(f"model_{stage}")
    more: dict[str, Any] = {"checkpoint": "none"} if stage == "finetune" else {}
    more |= {"precision": precision, "max_steps": 1, "val_interval": 1, "save_interval": 1}
    options = jobs.options_of(stage, folder, **more)
    run = jobs.make_run(getattr(script, stage.upper()), options, layout)

    def build():
        built = jobs.built_by(getattr(script, stage), run)
        built[-1].strategy.use_tp_pp_dp_mapping = stages_first
        return built

    return build


def real(layout, folder, stage, precision, stages_first):
    """What this rank holds after the first step of a real training."""
    import lightning.pytorch as pl
    from megatron.core import parallel_state

    from megakit.training import train

    found: dict[str, Any] = {}

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            weights = dict(pl_module.named_parameters())
            found["shapes"] = {
                name.replace("module.", ""): tuple(w.shape) for name, w in weights.items()
            }
            found["weight"] = sum(weight.nbytes for weight in weights.values())
            found["gradient"] = sum(w.main_grad.nbytes for w in weights.values())
            # Of the weights in the optimizer; those trained in bfloat16 have an original there.
            states = [
                value
                for part in trainer.optimizers[0].mcore_optimizer.chained_optimizers
                for weight, state in part.optimizer.state.items()
                for value in (state["exp_avg"], state["exp_avg_sq"], weight)
            ]
            is_original = precision == "bf16-mixed"
            found["optimizer"] = sum(
                value.nbytes for n, value in enumerate(states) if is_original or n % 3 < 2
            )

        def __deepcopy__(self, memo):
            return self

    module, data, trainer = builder(layout, folder, stage, precision, stages_first)()
    trainer.callbacks.insert(0, Watch())
    train(model=module, data=data, trainer=trainer)
    place = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    return place, found


def fake(layout, folder, *how):
    """The shares of the same job, computed in one process, by the ranks of each share."""
    from tools.shares import compute_shares

    return {
        rank: (
            (share.tensor_rank, data_rank, share.pipeline_rank),
            {"shapes": share.shapes}
            | {
                name: getattr(share, f"{name}_bytes")
                for name in ("weight", "gradient", "optimizer")
            },
        )
        for share in compute_shares(builder(layout, folder, *how), layout)
        for data_rank, rank in enumerate(share.ranks)
    }


@pytest.mark.parametrize(("stage", "name", "precision", "stages_first"), CASES)
def test_all_that_a_rank_holds(ranks, tmp_path, stage, name, precision, stages_first):
    layout = jobs.layout(**LAYOUTS[name])
    how = (layout, tmp_path, stage, precision, stages_first)
    expected = ranks.run(real, *how, world_size=layout.world_size)
    (found,) = ranks.run(fake, *how, world_size=1)
    assert [found[rank] for rank in range(layout.world_size)] == expected
