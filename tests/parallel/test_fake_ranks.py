"""Fake ranks hold and communicate what real ranks do; nothing of them is left."""

import importlib
import os
import sys
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from megakit.job.layout import Layout
from megakit.testing import RankError
from tests.parallel import jobs

LAYOUTS = {
    "tp2-pp2": {"world_size": 4, "tensor": 2, "pipeline": 2},
    "tp2-dp2": {"world_size": 4, "tensor": 2},
    "pp2-dp2": {"world_size": 4, "pipeline": 2},
}
GROUPS = {
    "tensor": "TENSOR_MODEL_PARALLEL_GROUP",
    "pipeline": "PIPELINE_MODEL_PARALLEL_GROUP",
    "data": "DATA_PARALLEL_GROUP_WITH_CP",
}
CASES = [
    ("first", "pretrain", "tp2-pp2", "32"),
    ("first", "pretrain", "pp2-dp2", "bf16-mixed"),
    pytest.param("first", "finetune", "tp2-dp2", "32", marks=pytest.mark.long),
    pytest.param("vit", "pretrain", "tp2-pp2", "32", marks=pytest.mark.long),
    pytest.param("vit", "finetune", "pp2-dp2", "bf16-mixed", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", autouse=True)
def by_value():
    """Ranks cannot import `tests`: an installed package may have the name, too."""
    cloudpickle.register_pickle_by_value(jobs)
    yield
    cloudpickle.unregister_pickle_by_value(jobs)


def make_run(model, stage, layout, folder, precision):
    script = importlib.import_module(f"{jobs.MODELS[model]}model_{stage}")
    options_class = getattr(script, f"{stage.capitalize()}Options")
    options = options_class(output_dir=folder, dataset="digits", precision=precision, max_steps=3)
    options.global_batch_size, options.val_interval, options.save_interval = 64, 3, 3
    if stage == "finetune":
        options.checkpoint = "none"
    run = jobs.make_run(getattr(script, stage.upper()), options, layout)
    return getattr(script, stage), run


def real(model, stage, layout, folder, precision):
    """What this rank holds, and communicates in the second step of a real training."""
    import lightning.pytorch as pl
    from megatron.core import parallel_state

    from megakit.testing.communication import CountCommunication
    from megakit.training import train

    counts = CountCommunication()
    found: dict[str, Any] = {}

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 1:
                counts.__enter__()

        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 2:
                counts.__exit__(None, None, None)
                weights = dict(pl_module.named_parameters())
                found["shapes"] = {
                    name.replace("module.", ""): tuple(w.shape) for name, w in weights.items()
                }
                found["weights"] = sum(weight.nbytes for weight in weights.values())
                found["gradients"] = sum(w.main_grad.nbytes for w in weights.values())
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

    work, run = make_run(model, stage, layout, folder, precision)
    module, data, trainer = jobs.built_by(work, run)
    trainer.callbacks.insert(0, Watch())
    train(model=module, data=data, trainer=trainer)
    assert counts.calls
    # Three values or fewer: the loss, the norm, and the shapes that stages exchange.
    found |= {name: counts.total(group, least=4) for name, group in GROUPS.items()}
    place = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    return place, found


def fake(model, stage, layout, folder, precision):
    """The shares of the same job, computed in one process; and the ranks of each share."""
    from megakit.testing import layout as command
    from megakit.testing.shares import compute_shares

    work, run = make_run(model, stage, layout, folder, precision)
    batch = command.first_batch(jobs.built_by(work, run)[1], layout.micro_batch_size)
    shares = compute_shares(lambda: jobs.built_by(work, run)[::2], batch, layout)
    return {
        rank: (
            (share.tensor_rank, share.pipeline_rank),
            {
                "shapes": share.shapes,
                "weights": share.weight_bytes,
                "gradients": share.gradient_bytes,
                "optimizer": share.optimizer_bytes,
                "tensor": share.tensor_bytes,
                "pipeline": share.pipeline_bytes,
                "data": share.data_bytes,
            },
        )
        for share in shares
        for rank in share.ranks(layout)
    }


def sharded(layout, folder):
    """Bytes of the optimizer's state on each of two ranks that share it."""
    from megakit.testing import layout as command
    from megakit.testing.shares import compute_shares

    work, run = make_run("first", "pretrain", layout, folder, "bf16-mixed")
    batch = command.first_batch(jobs.built_by(work, run)[1], layout.micro_batch_size)

    def make():
        module, _, trainer = jobs.built_by(work, run)
        trainer.strategy.ddp_config.use_distributed_optimizer = True
        return module, trainer

    (share,) = compute_shares(make, batch, layout)
    return share.num_parameters, share.optimizer_bytes


class TestAgainstRealRanks:
    @pytest.mark.parametrize(("model", "stage", "name", "precision"), CASES)
    def test_all_that_a_rank_holds_and_communicates(
        self, ranks, tmp_path, model, stage, name, precision
    ):
        layout = jobs.layout(**LAYOUTS[name])
        how = (model, stage, layout, tmp_path, precision)
        expected = ranks.run(real, *how, world_size=layout.world_size)
        (found,) = ranks.run(fake, *how, world_size=1)
        assert [found[rank] for rank in range(layout.world_size)] == expected
        for _, share in expected:
            assert share["weights"] > 0
        parts = {"tensor": "tp", "pipeline": "pp", "data": "dp"}
        for part, prefix in parts.items():
            assert any(share[part] > 0 for _, share in expected) == (prefix in name)

    def test_the_distributed_optimizer_divides_its_state(self, ranks, tmp_path):
        (found,) = ranks.run(sharded, jobs.layout(world_size=2), tmp_path, world_size=1)
        assert found == (101_651, 12 * 101_651 // 2)

    def test_the_formulas_of_the_document(self, ranks, tmp_path):
        """TP2 x PP2 x DP2, 4 micro batches of 8: docs/parallelism.md's tables, by hand."""
        layout = Layout(8, 1, 2, 2, 64, 8)
        (found,) = ranks.run(fake, "first", "pretrain", layout, tmp_path, "32", world_size=1)
        (_, first), (_, last) = found[0], found[7]
        encoder, decoder = 32 * 784 + 32 + 3 * 32 + 3, 32 * 3 + 32 + 784 * 32 + 784
        for share, number in ((first, encoder), (last, decoder)):
            assert [share[key] for key in ("weights", "gradients", "optimizer", "data")] == [
                *(4 * number, 4 * number, 8 * number, 4 * number),
            ]
            assert share["pipeline"] == 4 * (8 * 3 * 4)
        assert first["tensor"] == 4 * (8 * 3 * 4)  # z; the images need no gradient
        assert last["tensor"] == 4 * (8 * 784 * 4 + 8 * 3 * 4)  # x_hat, linear3's gradient


def coordinates(rank, world_size, sizes):
    from megatron.core import parallel_state

    from megakit.testing import fake_ranks

    with fake_ranks(rank, world_size, **sizes):
        return [
            (
                getattr(parallel_state, f"get_{name}_rank")(),
                getattr(parallel_state, f"get_{name}_world_size")(),
            )
            for name in (
                *("tensor_model_parallel", "context_parallel"),
                *("data_parallel", "pipeline_model_parallel"),
            )
        ]


def leaves_nothing():
    """A fake job, then a real one, in one process; whether all is as before."""
    import torch
    from megatron.core import parallel_state

    from megakit.testing import distributed_model_parallel_state, mock_distributed_parallel_state

    before = (dict(os.environ), sys.excepthook, torch.get_rng_state().tolist())
    with mock_distributed_parallel_state(1024, 700, tensor_model_parallel_size=8):
        inside = (
            os.environ["RANK"],
            torch.distributed.get_world_size(),
            parallel_state.get_data_parallel_world_size(),
        )
        torch.rand(3)
    after = (dict(os.environ), sys.excepthook, torch.get_rng_state().tolist())
    is_clean = not torch.distributed.is_initialized() and before == after
    with distributed_model_parallel_state(tensor_model_parallel_size=2):
        total = torch.tensor(torch.distributed.get_rank() + 1)
        torch.distributed.all_reduce(total)
        return inside, is_clean, int(total)


def join_as(environment):
    """Joins a job by arguments, in spite of what the environment says."""
    import torch

    from megakit.testing import distributed_model_parallel_state

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(environment)
    with distributed_model_parallel_state(rank=rank, world_size=world_size):
        inside = {name: os.environ[name] for name in environment}
        total = torch.tensor(10**rank)
        torch.distributed.all_reduce(total)
    return inside, {name: os.environ[name] for name in environment}, int(total)


def counted():
    """The calls of collectives whose inputs and outputs differ, and of a group of one rank."""
    import torch
    from megatron.core import parallel_state

    from megakit.testing import fake_ranks
    from megakit.testing.communication import CountCommunication

    with fake_ranks(1, 4, tensor_model_parallel_size=4), CountCommunication() as counts:
        group = parallel_state.get_tensor_model_parallel_group()
        part, whole = torch.zeros(2, 3), torch.zeros(8, 3)
        torch.distributed.all_gather_into_tensor(whole, part, group=group)
        torch.distributed.reduce_scatter_tensor(part, whole.clone(), group=group)
        torch.distributed.all_reduce(part.bfloat16(), group=group)
        torch.distributed.send(part, 2, group=group)
        torch.distributed.recv(part, 0, group=group)
        torch.distributed.barrier(group=group)
        torch.distributed.broadcast(part, 1, group=parallel_state.get_data_parallel_group())
    return counts.calls, counts.total(GROUPS["tensor"], least=7), counts.total(GROUPS["data"])


class TestFakeRanks:
    def test_a_collective_counts_its_whole_tensor(self, ranks):
        ((calls, large, data),) = ranks.run(counted, world_size=1)
        group = GROUPS["tensor"]
        assert calls == [(group, 24, 96), (group, 24, 96), (group, 6, 12), (group, 6, 24)]
        assert (large, data) == (192, 0)

    def test_coordinates(self, ranks):
        """Megatron's order: tensor 4, context 2, data 32, pipeline 8."""
        sizes = {
            "tensor_model_parallel_size": 4,
            "context_parallel_size": 2,
            "pipeline_model_parallel_size": 8,
        }
        rank = 2 + 4 * (1 + 2 * (26 + 32 * 5))
        (found,) = ranks.run(coordinates, rank, 4 * 2 * 32 * 8, sizes, world_size=1)
        assert found == [(2, 4), (1, 2), (26, 32), (5, 8)]

    def test_nothing_is_left_and_a_real_job_follows(self, ranks):
        assert ranks.run(leaves_nothing, world_size=2) == [(("700", 1024, 128), True, 3)] * 2

    def test_refused(self, ranks):
        message = "ValueError: rank=8: a job of 8 ranks has the ranks 0 to 7"
        with pytest.raises(RankError, match=message):
            ranks.run(coordinates, 8, 8, {}, world_size=1)
        assert ranks.run(leaves_nothing, world_size=2)[0][1]

    def test_the_given_rank_and_world_size_count(self, ranks):
        wrong = {"RANK": "7", "WORLD_SIZE": "9"}
        expected = [({"RANK": str(rank), "WORLD_SIZE": "2"}, wrong, 11) for rank in range(2)]
        assert ranks.run(join_as, wrong, world_size=2) == expected
