"""Options of the strategy in trainings of a tiny GPT: the same losses, and exact resumption."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any, Literal

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest

from tests.parallel import text_jobs
from tests.parallel.text_jobs import STEPS, How, Trained

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "dp2": {"world_size": 2},
    "tp2": {"world_size": 2, "tensor": 2},
    "pp2": {"world_size": 2, "pipeline": 2},
    "tp2-dp2": {"world_size": 4, "tensor": 2},
    "pp2-dp2": {"world_size": 4, "pipeline": 2},
    "tp2-pp2": {"world_size": 4, "tensor": 2, "pipeline": 2},
}
SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
SEQUENCE = {"sequence_parallel": True}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "attention": {"recompute_granularity": "selective"},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
}
TOLERANCE = 1e-5  # relative, of a loss in float32: sums in another order differ in the last bits
STOP = STEPS // 2

Precision = Literal["32", "bf16-mixed"]


@pytest.fixture(scope="module")
def train(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains in a layout; the result has one entry for each rank."""
    cloudpickle.register_pickle_by_value(text_jobs)  # ranks cannot import it

    def train(layout: str, how: How = How(), folder: Path | None = None) -> list[Trained]:  # noqa: B008
        sizes = text_jobs.layout(**LAYOUTS[layout])
        folder = folder or tmp_path_factory.mktemp("run")
        results: list[Trained] = ranks.run(
            *(text_jobs.train, sizes, folder, how), world_size=sizes.world_size
        )
        return results

    return train


@pytest.fixture(scope="module")
def alone(train: Any) -> np.ndarray:
    """The losses of one process, which all layouts have to reach."""
    losses = np.array(train("one")[0].losses)
    assert len(losses) == STEPS
    assert losses[-1] < 0.9 * losses[0]
    return losses


def assert_exact(train: Any, folder: Path, layout: str, stop: int = STOP, **how: Any) -> None:
    """A training that stops and resumes does what an uninterrupted one does, bit by bit."""
    whole = train(layout, How(**how), folder / "whole")
    first = train(layout, How(**how, stop_before=stop), folder / "parts")
    second = train(layout, How(**how, resume=first[0].checkpoint), folder / "parts")
    for expected, begun, ended in zip(whole, first, second, strict=True):
        assert begun.losses + ended.losses == expected.losses
        assert begun.optimizer == ended.optimizer == expected.optimizer
        assert ended.weights.keys() == expected.weights.keys()
        for name, weight in ended.weights.items():
            np.testing.assert_array_equal(weight, expected.weights[name], err_msg=name)
        assert len(ended.adam) == len(expected.adam) > 0
        for state, its in zip(ended.adam, expected.adam, strict=True):
            np.testing.assert_array_equal(state, its)
        assert ended.val_loss == expected.val_loss
    assert len(whole[-1].losses) == STEPS
    assert len(second[-1].losses) == STEPS - stop


class TestResumption:
    def test_distributed_optimizer(self, train: Any, tmp_path: Path) -> None:
        assert_exact(train, tmp_path, "dp2", strategy=SHARDED)

    @pytest.mark.long
    def test_distributed_optimizer_before_its_first_step(self, train: Any, tmp_path: Path) -> None:
        """The optimizer has no state yet, which the checkpoint has to contain."""
        assert_exact(train, tmp_path, "dp2", 0, strategy=SHARDED)

    @pytest.mark.long
    @pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
    @pytest.mark.parametrize("layout", ["one", "dp2", "tp2-dp2", "pp2-dp2"])
    def test_distributed_optimizer_in_layouts(
        self, train: Any, tmp_path: Path, layout: str, precision: Precision
    ) -> None:
        assert_exact(train, tmp_path, layout, strategy=SHARDED, precision=precision)

    @pytest.mark.long
    @pytest.mark.parametrize("layout", ["dp2", "pp2-dp2"])
    def test_overlapped_communication(self, train: Any, tmp_path: Path, layout: str) -> None:
        assert_exact(train, tmp_path, layout, strategy=OVERLAPPED)

    @pytest.mark.long
    def test_sequence_parallel(self, train: Any, tmp_path: Path) -> None:
        assert_exact(train, tmp_path, "tp2", strategy=SEQUENCE)

    def test_dropout(self, train: Any, tmp_path: Path) -> None:
        assert_exact(train, tmp_path, "one", config=DROPOUT)

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("layout", "strategy"),
        [("tp2", {}), ("tp2-pp2", SEQUENCE), ("tp2-dp2", {**SEQUENCE, **SHARDED})],
    )
    def test_dropout_in_layouts(
        self, train: Any, tmp_path: Path, layout: str, strategy: dict[str, bool]
    ) -> None:
        config = {**DROPOUT, **RECOMPUTED["full"]}
        assert_exact(train, tmp_path, layout, strategy=strategy, config=config)

    @pytest.mark.long
    def test_validation_does_not_change_dropout(self, train: Any) -> None:
        often = train("one", How(config=DROPOUT, val_interval=3))
        assert often[0].losses == train("one", How(config=DROPOUT))[0].losses


@pytest.mark.long
class TestOtherLayouts:
    @pytest.fixture(scope="class")
    def stopped(self, train: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
        """A checkpoint of a distributed optimizer, or of a common one."""

        @cache
        def stop(is_distributed: bool, precision: Precision) -> str:
            strategy = SHARDED if is_distributed else {}
            how = How(strategy=strategy, stop_before=STOP, precision=precision)
            folder = tmp_path_factory.mktemp("stopped")
            return str(train("dp2", how, folder)[0].checkpoint)

        return stop

    @pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "tp2-dp2"])
    def test_distributed_optimizer(
        self, train: Any, alone: np.ndarray, stopped: Any, tmp_path: Path, layout: str
    ) -> None:
        kept = shutil.copytree(stopped(True, "32"), tmp_path / "step=000010")
        resumed = train(layout, How(strategy=SHARDED, resume=str(kept)))
        np.testing.assert_allclose(resumed[-1].losses, alone[STOP:], rtol=TOLERANCE)

    @pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
    @pytest.mark.parametrize("was_distributed", [True, False])
    def test_the_other_optimizer_is_refused(
        self, ranks: Any, stopped: Any, tmp_path: Path, was_distributed: bool, precision: Precision
    ) -> None:
        strategy = {} if was_distributed else SHARDED
        checkpoint = stopped(was_distributed, precision)
        how = How(strategy=strategy, resume=checkpoint, precision=precision)
        sizes = text_jobs.layout(2)
        messages = ranks.run(text_jobs.refusal, sizes, tmp_path, how, world_size=2)
        for message in messages:
            assert f"was written with use_distributed_optimizer={was_distributed}" in message
            remedy = f'strategy={{"use_distributed_optimizer": {was_distributed}}}'
            assert f"Resume with {remedy}, or" in message


class TestLosses:
    @pytest.mark.parametrize(
        "layout", ["tp2", *(pytest.param(n, marks=pytest.mark.long) for n in ("tp2-pp2",))]
    )
    def test_sequence_parallel(self, train: Any, alone: np.ndarray, layout: str) -> None:
        trained = train(layout, How(strategy=SEQUENCE))
        np.testing.assert_allclose(trained[-1].losses, alone, rtol=TOLERANCE)
        expected = train("one")[0].val_loss
        assert trained[0].val_loss == pytest.approx(expected, rel=TOLERANCE)

    @pytest.mark.long
    @pytest.mark.parametrize("strategy", [OVERLAPPED, {"overlap_grad_reduce": True}])
    @pytest.mark.parametrize("layout", ["dp2", "pp2-dp2"])
    def test_overlapped_communication(
        self, train: Any, alone: np.ndarray, layout: str, strategy: dict[str, bool]
    ) -> None:
        trained = train(layout, How(strategy=strategy))
        np.testing.assert_allclose(trained[-1].losses, alone, rtol=TOLERANCE)

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("kind", "layout", "precision", "strategy"),
        [
            *(
                ("full", layout, precision, {})
                for layout in ("one", "tp2", "pp2")
                for precision in ("32", "bf16-mixed")
            ),
            *((kind, "tp2", "bf16-mixed", SEQUENCE) for kind in RECOMPUTED),
            *((kind, "tp2", "32", SEQUENCE) for kind in RECOMPUTED),
        ],
    )
    def test_recomputation(
        self, train: Any, kind: str, layout: str, precision: Precision, strategy: dict[str, bool]
    ) -> None:
        # Megatron cannot recompute an MLP with a bias.
        common = {**DROPOUT, "add_bias_linear": kind != "mlp"}
        without, recomputed = (
            train(layout, How(strategy=strategy, config=config, precision=precision))
            for config in (common, {**common, **RECOMPUTED[kind]})
        )
        assert recomputed[-1].losses == without[-1].losses


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tp2", "tp2-pp2"])
def test_predictions_with_sequence_parallel(
    train: Any, ranks: Any, tmp_path: Path, layout: str
) -> None:
    checkpoint = train("one", How(stop_before=STOP))[0].checkpoint
    one, sizes = text_jobs.layout(), text_jobs.layout(**LAYOUTS[layout])
    predict = text_jobs.predict
    (expected,) = ranks.run(predict, one, tmp_path, checkpoint, {}, world_size=1)
    logits, *others = ranks.run(
        *(predict, sizes, tmp_path, checkpoint, SEQUENCE), world_size=sizes.world_size
    )
    assert all(other is None for other in others)
    assert expected.shape == (10, 16, 32)
    assert np.ptp(expected, axis=0).max() > 0.1
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


def test_a_shard_without_weights(ranks: Any) -> None:
    """A rank whose shard of the buffer is padding only has a state to save and to restore."""
    assert ranks.run(restore_small_shards, world_size=2) == [[], []]


def restore_small_shards() -> list[str]:
    """Saves and restores the optimizer of four weights, which are all on rank 0; lists problems."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    from megakit.testing import distributed_model_parallel_state
    from megakit.training.distributed_optimizer import make_resumption_exact

    make_resumption_exact()
    with distributed_model_parallel_state():
        states: list[Any] = []
        for _ in range(2):
            model = DistributedDataParallel(
                TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1),
                DistributedDataParallelConfig(use_distributed_optimizer=True),
                torch.nn.Linear(4, 1, bias=False),
            )
            config = OptimizerConfig(lr=0.1, use_distributed_optimizer=True)
            optimizer = get_megatron_optimizer(config, [model])
            if states:
                optimizer.load_state_dict(states[0])
            else:
                for _ in range(3):
                    for weight in model.parameters():
                        weight.main_grad.fill_(1.0)
                    optimizer.step()
            states.append(optimizer.state_dict())
        saved, restored = (
            [group["step"] for group in state["optimizer"]["param_groups"]] for state in states
        )
        is_empty = not optimizer.chained_optimizers[0].optimizer.state
        problems = [] if is_empty == (torch.distributed.get_rank() == 1) else ["the shards"]
        expected = [0.0 if is_empty else 3.0] * len(saved)
        problems += [] if saved == expected else [f"saved {saved}"]
        return problems + ([] if restored == expected else [f"restored {restored}"])
