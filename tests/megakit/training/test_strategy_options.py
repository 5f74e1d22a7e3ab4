"""What is refused before training: options and fields of a config that would have no effect."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megakit.errors import UserError
from megakit.job.layout import Layout
from tests.parallel import jobs

pytestmark = pytest.mark.usefixtures("megatron")

ONE, TENSOR = Layout(1, 1, 1, 1, 8, 8), Layout(2, 1, 2, 1, 8, 8)


def strategy(layout: Layout = ONE, precision: Any = "32", **options: Any) -> Any:
    from nemo import lightning as nl

    from megakit.training import build_strategy

    requested: Any = options
    built = build_strategy(layout, requested)
    built.precision_plugin = nl.MegatronMixedPrecision(precision=precision)
    return built


def module(optimizer: Any = None, **fields: Any) -> Any:
    """A Lightning module whose config has the fields."""
    from megakit.training import megatron_adam
    from model_components import BionemoLightningModule, PretrainConfig

    return BionemoLightningModule(PretrainConfig(**fields), optimizer or megatron_adam(1e-3))


class TestOptions:
    def test_they_reach_nemos_strategy(self) -> None:
        names = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
        for value in (True, False):
            options: dict[str, Any] = dict.fromkeys(("sequence_parallel", *names), value)
            built = strategy(TENSOR, **options)
            assert built.sequence_parallel is value
            assert [getattr(built.ddp_config, name) for name in names] == [value] * 3
        plain = strategy(TENSOR)
        assert not plain.sequence_parallel
        assert not any(getattr(plain.ddp_config, name) for name in names)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"sequence_paralel": True}, "no such option. There are sequence_parallel, use_dist"),
            ({"sequence_parallel": True}, "--tensor-parallel is 1. Set --tensor-parallel"),
            ({"overlap_grad_reduce": 1}, "has to be True or False"),
            ({"overlap_param_gather": True}, "needs use_distributed_optimizer and overlap_grad"),
            (
                {"overlap_param_gather": True, "use_distributed_optimizer": True},
                "needs overlap_grad_reduce. Set both",
            ),
        ],
    )
    def test_what_has_no_effect_is_refused(self, options: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            strategy(**options)

    def test_stages_pass_them_on(self, tmp_path: Path) -> None:
        from megakit.training import predict_stage, train_stage
        from model_components import MNISTDataModule
        from model_pretrain import PRETRAIN, PretrainOptions

        options = PretrainOptions(output_dir=tmp_path, dataset="digits", precision="32")
        run, data = jobs.make_run(PRETRAIN, options, ONE), MNISTDataModule(dataset="digits")
        unknown: Any = {"parallel": True}
        for stage in (train_stage, predict_stage):
            with pytest.raises(UserError, match=r"'parallel': .* there is no such option"):
                stage(run, module(), data, strategy=unknown)


class TestDistributedOptimizer:
    @pytest.mark.parametrize("requested", [True, False])
    def test_the_option_sets_both_configs(self, requested: bool) -> None:
        built, model = strategy(use_distributed_optimizer=requested), module()
        built.connect(model)
        assert model.optim.config.use_distributed_optimizer is requested
        assert built.ddp_config.use_distributed_optimizer is requested

    def test_without_the_option_the_optimizer_decides(self) -> None:
        from megakit.training import megatron_adam

        built = strategy()
        built.connect(module(megatron_adam(1e-3, use_distributed_optimizer=True)))
        assert built.ddp_config.use_distributed_optimizer

    def test_a_contradiction_is_refused(self) -> None:
        from megakit.training import megatron_adam

        model = module(megatron_adam(1e-3, use_distributed_optimizer=True))
        with pytest.raises(UserError, match=r"Remove the argument of the optimizer\.$"):
            strategy(use_distributed_optimizer=False).connect(model)


class TestConfig:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                {"tensor_model_parallel_size": 2},
                "tensor_model_parallel_size is 2, .* overwrite it with 1: --tensor-parallel sets",
            ),
            (
                {"sequence_parallel": True, "tensor_model_parallel_size": 2},
                r'sequence_parallel is True, .* with False: strategy={"sequence_parallel": \.\.\.}',
            ),
            (
                {"context_parallel_size": 2},
                ".* with 1: megakit divides ranks into tensor, pipeline",
            ),
            ({"num_layers_in_first_pipeline_stage": 1}, ".* with None: megakit has no option"),
            ({"bf16": True}, "bf16 is True, .* with False: --precision sets this field"),
            ({"params_dtype": torch.float16}, ".* with torch.float32: --precision"),
        ],
    )
    def test_a_field_that_is_overwritten_is_refused(self, fields: Any, message: str) -> None:
        model = module(**fields)
        with pytest.raises(UserError, match=rf"PretrainConfig\.{message}"):
            strategy().connect(model)
        for name, value in fields.items():
            assert getattr(model.config, name) == value

    def test_all_fields_are_reported(self) -> None:
        with pytest.raises(UserError) as refusal:
            strategy().connect(module(bf16=True, context_parallel_size=2))
        assert "context_parallel_size" in str(refusal.value)
        assert "bf16" in str(refusal.value)

    def test_the_strategys_own_values_pass(self) -> None:
        model = module(
            tensor_model_parallel_size=2, sequence_parallel=True, params_dtype=torch.float32
        )
        strategy(TENSOR, sequence_parallel=True).connect(model)
        assert model.config.sequence_parallel

    def test_a_config_may_be_used_in_another_layout(self) -> None:
        """The fields then have the values that the earlier strategy wrote."""
        model = module()
        strategy(TENSOR, "bf16-mixed", sequence_parallel=True).connect(model)
        assert model.config.tensor_model_parallel_size == 2
        assert model.config.bf16
        strategy().connect(model)
        assert model.config.tensor_model_parallel_size == 1
        assert not model.config.sequence_parallel
        assert not model.config.bf16

    def test_a_default_of_the_users_class_counts(self) -> None:
        from megakit.training import megatron_adam
        from model_components import BionemoLightningModule, PretrainConfig

        @dataclass
        class Bfloat16Config(PretrainConfig):
            bf16: bool = True

        model = BionemoLightningModule(Bfloat16Config(), megatron_adam(1e-3))
        with pytest.raises(UserError, match=r"Bfloat16Config\.bf16 is True"):
            strategy().connect(model)


class TestModel:
    """Settings that a built model would ignore."""

    @staticmethod
    def check(model: torch.nn.Module, **fields: Any) -> None:
        from megakit.training.strategy_options import check_has_effect
        from model_components import PretrainConfig

        config = PretrainConfig()
        for name, value in fields.items():
            setattr(config, name, value)
        check_has_effect(config, model)

    @staticmethod
    def block() -> torch.nn.Module:
        from megatron.core.transformer.transformer_block import TransformerBlock

        return TransformerBlock.__new__(TransformerBlock)

    @pytest.fixture
    def transformer(self) -> torch.nn.Module:
        block = self.block()
        torch.nn.Module.__init__(block)
        return torch.nn.Sequential(block)

    def test_recomputation_of_a_model_without_layers(self, transformer: torch.nn.Module) -> None:
        self.check(transformer, recompute_granularity="full")
        with pytest.raises(UserError, match="recompute_granularity is 'full', and the model has"):
            self.check(torch.nn.Linear(1, 1), recompute_granularity="full")

    @pytest.mark.parametrize("field", [{"recompute_num_layers": 1}, {"recompute_method": "block"}])
    def test_recomputation_without_a_granularity(
        self, transformer: torch.nn.Module, field: dict[str, Any]
    ) -> None:
        with pytest.raises(UserError, match="has no effect without recompute_granularity"):
            self.check(transformer, **field)

    def test_recomputation_that_needs_transformer_engine(
        self, transformer: torch.nn.Module
    ) -> None:
        selective = {"recompute_granularity": "selective"}
        self.check(transformer, **selective, recompute_modules=["core_attn"])
        with pytest.raises(UserError, match="layernorm, which Megatron recomputes only with Tran"):
            self.check(transformer, **selective, recompute_modules=["core_attn", "layernorm"])

    def test_recomputation_of_an_mlp_with_a_bias(self, transformer: torch.nn.Module) -> None:
        selective = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
        self.check(transformer, **selective, add_bias_linear=False)
        with pytest.raises(UserError, match=r"mlp, .* Set add_bias_linear=False, or recompute_gr"):
            self.check(transformer, **selective, add_bias_linear=True)

    def test_a_sequence_that_ranks_cannot_divide(self, transformer: torch.nn.Module) -> None:
        vars(transformer)["max_sequence_length"] = 15
        sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
        with pytest.raises(UserError, match="max_sequence_length is 15, which 2 tensor-parallel"):
            self.check(transformer, **sizes)
        vars(transformer)["max_sequence_length"] = 16
        self.check(transformer, **sizes)
