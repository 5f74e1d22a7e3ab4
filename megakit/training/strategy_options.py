"""Defines the options of the strategy, and refuses settings that would have no effect."""

from collections.abc import Iterator, Mapping
from typing import Any, TypedDict, get_type_hints

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

from megakit.errors import UserError
from megakit.job.layout import Layout


class StrategyOptions(TypedDict, total=False):
    """Options of the strategy; an option that is left out is off.

    Attributes:
        sequence_parallel: Whether tensor-parallel ranks also divide the sequence in normalization
            and dropout. The activations between attention and MLP then need 1/t of the memory,
            where t is the tensor-parallel size. Needs tensor parallelism, a sequence length that t
            divides, and a model that divides the sequence after its embedding, like `GPTModel`.
        use_distributed_optimizer: Whether to shard the optimizer's state over the data-parallel
            ranks. With one data-parallel rank, this has no effect on memory.
        overlap_grad_reduce: Whether to reduce the gradients of a bucket of weights during the
            backward pass, instead of after the pass.
        overlap_param_gather: Whether to gather the updated weights during the next forward pass.
            Needs `use_distributed_optimizer` and `overlap_grad_reduce`.
    """

    sequence_parallel: bool
    use_distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool


#: For fields of the model's config that the strategy overwrites: what sets them instead.
_LAYOUT = {
    "tensor_model_parallel_size": "--tensor-parallel sets this field",
    "pipeline_model_parallel_size": "--pipeline-parallel sets this field",
    "sequence_parallel": 'strategy={"sequence_parallel": ...} of `train_stage` sets this field',
    "context_parallel_size": (
        "megakit divides ranks into tensor, pipeline and data parallel ranks only, and Megatron's "
        "own attention has no context parallelism"
    ),
    **dict.fromkeys(
        (
            *("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout"),
            *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
            *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
            "expert_model_parallel_size",
        ),
        "megakit has no option for this field",
    ),
}
_PRECISION = dict.fromkeys(
    ("fp16", "bf16", "params_dtype", "fp8", "fp4"), "--precision sets this field"
)
#: The config attribute with the values that the strategy wrote into the config.
_WRITTEN = "_written_by_strategy"


def check_options(options: Mapping[str, Any], layout: Layout) -> None:
    """Checks the options of the strategy against each other and against the layout.

    Raises:
        UserError: An option is unknown or no boolean, or would have no effect.
    """
    known = get_type_hints(StrategyOptions)
    problems = [
        f"strategy={{{name!r}: ...}}: there is no such option. There are {', '.join(known)}."
        for name in sorted(options.keys() - known.keys())
    ]
    problems += [
        f"strategy={{{name!r}: {value!r}}}: the value has to be True or False."
        for name, value in options.items()
        if name in known and type(value) is not bool
    ]
    if options.get("sequence_parallel") and layout.tensor == 1:
        problems.append(
            'strategy={"sequence_parallel": True}: tensor-parallel ranks divide the sequence, and '
            "--tensor-parallel is 1. Set --tensor-parallel, or leave the option out."
        )
    needed = ("use_distributed_optimizer", "overlap_grad_reduce")
    missing = [name for name in needed if not options.get(name)]
    if options.get("overlap_param_gather") and missing:
        problems.append(
            f'strategy={{"overlap_param_gather": True}}: this needs {" and ".join(missing)}. '
            "Set both options, or leave this one out."
        )
    if problems:
        raise UserError(problems)


def connect_optimizer(optimizer: Any, ddp_config: Any, requested: bool | None) -> None:
    """Writes `use_distributed_optimizer` into the configs of the optimizer and the gradients.

    Without this function, NeMo's strategy would use the optimizer's setting, which is usually a
    default.

    Args:
        optimizer: The optimizer module of the model.
        ddp_config: The strategy's config of the gradients.
        requested: The strategy's option; None if the option is left out.

    Raises:
        UserError: The optimizer module requests what the option excludes.
    """
    config = getattr(optimizer, "config", None)
    if not isinstance(config, OptimizerConfig):
        return
    if requested is False and config.use_distributed_optimizer:
        raise UserError(
            'strategy={"use_distributed_optimizer": False}: the model\'s optimizer has '
            "use_distributed_optimizer=True. Remove the argument of the optimizer."
        )
    if isinstance(ddp_config, DistributedDataParallelConfig) and requested is not None:
        config.use_distributed_optimizer = ddp_config.use_distributed_optimizer = requested


def check_not_overwritten(config: object, parallelism: object, dtypes: object) -> None:
    """Checks that the strategy overwrites no field of a model's config that the user has set.

    A field is set if it differs from Megatron's default and from what an earlier strategy wrote.

    Args:
        config: The model's config.
        parallelism: The layout fields that the strategy writes, as attributes.
        dtypes: The precision fields that the strategy writes, as attributes; None for nothing.

    Raises:
        UserError: A field has another value than the strategy writes; the message lists all.
    """
    if not isinstance(config, TransformerConfig):
        return
    earlier, written = vars(config).get(_WRITTEN, {}), {}
    problems = []
    for name, remedy, source in _overwritten(parallelism, dtypes):
        value, new = getattr(config, name), getattr(source, name)
        written[name] = new
        if value not in (getattr(TransformerConfig, name), new, earlier.get(name, new)):
            problems.append(
                f"{type(config).__name__}.{name} is {value}, and the strategy would overwrite it "
                f"with {new}: {remedy}. Leave the field out of the config."
            )
    if problems:
        raise UserError(problems)
    vars(config)[_WRITTEN] = written


def _overwritten(*sources: object) -> Iterator[tuple[str, str, object]]:
    """Yields the name of each overwritten field, what sets the field, and the new values."""
    for source, remedies in zip(sources, (_LAYOUT, _PRECISION), strict=True):
        for name, remedy in remedies.items():
            if hasattr(source, name) and hasattr(TransformerConfig, name):
                yield name, remedy, source


def check_has_effect(config: object, model: nn.Module) -> None:
    """Checks that a built model uses its config's recomputation and can divide its sequences.

    Args:
        config: The model's config, with the layout.
        model: This rank's part of the model.

    Raises:
        UserError: The model would ignore the setting, or fail in its first step.
    """
    if not isinstance(config, TransformerConfig):
        return
    problems = list(_recomputation_problems(config, model))
    size = config.tensor_model_parallel_size
    lengths = {getattr(module, "max_sequence_length", size) for module in model.modules()}
    if config.sequence_parallel and (uneven := [length for length in lengths if length % size]):
        problems.append(
            f"The model's max_sequence_length is {uneven[0]}, which {size} tensor-parallel ranks "
            'cannot divide. Use a multiple, or leave strategy={"sequence_parallel": True} out.'
        )
    if problems:
        raise UserError(problems)


def _recomputation_problems(config: TransformerConfig, model: nn.Module) -> Iterator[str]:
    """Yields what is wrong with a config's recomputation of activations."""
    name, granularity = type(config).__name__, config.recompute_granularity
    if granularity is None:
        for field in ("recompute_method", "recompute_num_layers"):
            if getattr(config, field) is not None:
                yield (
                    f"{name}.{field} is {getattr(config, field)}, and has no effect without "
                    'recompute_granularity. Set recompute_granularity="full".'
                )
        return
    if not any(isinstance(module, TransformerBlock) for module in model.modules()):
        yield (
            f"{name}.recompute_granularity is {granularity!r}, and the model has no "
            "TransformerBlock, which is what recomputes. Leave the field out."
        )
    if granularity != "selective":
        return
    modules = set(config.recompute_modules or ())
    needs_engine = sorted(modules & {"layernorm", "mla_up_proj", "moe_act"})
    if needs_engine and not HAVE_TE:
        yield (
            f"{name}.recompute_modules contains {', '.join(needs_engine)}, which Megatron "
            'recomputes only with Transformer Engine. Use "core_attn".'
        )
    if "mlp" in modules and config.add_bias_linear:
        # Megatron's checkpoint returns the bias, which then is part of every later step's graph.
        yield (
            f"{name}.recompute_modules contains mlp, which Megatron cannot recompute with a bias: "
            "each step would take more time and memory. Set add_bias_linear=False, or "
            'recompute_granularity="full".'
        )
