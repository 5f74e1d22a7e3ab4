"""Plans how a job's processes share the work, and checks the plan before the processes start."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megakit.job.cluster import Cluster
from megakit.job.option_types import flag
from megakit.job.options import CommonOptions

#: Sizes of a model, by Megatron's names, and their values if they are unknown: width of the layers
#: that tensor parallelism splits, attention heads, which it splits too, layers or parts that
#: pipeline parallelism splits, and positions of a sample, such as the tokens of a text.
SIZES = {"hidden_size": 0, "num_attention_heads": 0, "num_layers": 0, "seq_length": 1}


def find_sizes(options: CommonOptions, settings: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes of the model that a command trains or uses, by their names in `SIZES`.

    Args:
        options: The options. A size is a field, or a class attribute if no option sets it; None
            stands for the size in the start checkpoint.
        settings: The settings of the start checkpoint's model.
    """
    sizes = {}
    for name, unknown in SIZES.items():
        # Only an options class says which sizes are split; the width always is.
        has_size = name == "hidden_size" or hasattr(options, name)
        stored = settings.get(name) if has_size else None
        sizes[name] = getattr(options, name, None) or stored or unknown
    return sizes


@dataclass(frozen=True)
class Layout:
    """Numbers of processes, ranks and samples in a job.

    Attributes:
        devices: Processes per machine.
        num_nodes: Number of machines.
        tensor: Tensor-parallel ranks, which split each layer.
        pipeline: Pipeline stages, which split the sequence of layers.
        global_batch_size: Samples per step over all ranks.
        micro_batch_size: Samples per rank and forward pass.
    """

    devices: int
    num_nodes: int
    tensor: int
    pipeline: int
    global_batch_size: int
    micro_batch_size: int

    @property
    def world_size(self) -> int:
        """Number of processes in the job."""
        return self.devices * self.num_nodes

    @property
    def data(self) -> int:
        """Number of data-parallel ranks, which process different samples."""
        return self.world_size // (self.tensor * self.pipeline)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro batches of each rank in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.data)

    @property
    def parallel(self) -> dict[str, int]:
        """Numbers of tensor-parallel ranks, pipeline stages and data-parallel ranks."""
        return {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}

    def __str__(self) -> str:
        if self.world_size == 1:
            return "1 process"
        parts = " x ".join(f"{name} {number}" for name, number in self.parallel.items())
        return f"{self.world_size} processes: {parts}"


def plan_layout(
    options: CommonOptions, cluster: Cluster, sizes: Mapping[str, int]
) -> tuple[Layout, list[str]]:
    """Plans the requested layout, and returns the reasons if the layout is impossible.

    Args:
        options: Options of the command line, with valid values.
        cluster: The job as torchrun or srun started it.
        sizes: Sizes of the model that is split. Every number divides an unknown size.

    Returns:
        The layout, and one message per problem, with the arithmetic. The layout is valid only if
        there are no problems.
    """
    devices = options.devices or cluster.devices
    num_nodes = options.num_nodes or cluster.num_nodes
    tensor, pipeline = options.tensor_parallel, options.pipeline_parallel
    world_size, model_parallel = devices * num_nodes, tensor * pipeline
    problems = _cluster_problems(options, cluster) + _size_problems(sizes, tensor, pipeline)
    data = max(1, world_size // model_parallel)
    asked, batch = options.micro_batch_size, getattr(options, "global_batch_size", None)
    share = batch // data if batch else asked or options.largest_micro_batch
    micro = asked or _largest_divisor(share, options.largest_micro_batch)
    if world_size % model_parallel:
        problems.append(
            f"--tensor-parallel {tensor} x --pipeline-parallel {pipeline} = {model_parallel}: has "
            f"to divide the number of processes, {devices} x {num_nodes} = {world_size}. "
            f"Use --devices {model_parallel}, for example."
        )
    elif batch and batch % data:
        problems.append(
            f"--global-batch-size {batch}: has to be a multiple of the number of data-parallel "
            f"ranks, {data}. Try {-(-batch // data) * data}."
        )
    elif share % micro:
        problems.append(
            f"--micro-batch-size {micro} x {data} data-parallel ranks = {micro * data}: has to "
            f"divide --global-batch-size {batch}. Try {_largest_divisor(share, micro)}."
        )
    return Layout(devices, num_nodes, tensor, pipeline, batch or micro * data, micro), problems


def _cluster_problems(options: CommonOptions, cluster: Cluster) -> list[str]:
    problems = []
    for name in ("devices", "num_nodes"):
        asked, given = getattr(options, name), getattr(cluster, name)
        if cluster.launcher and asked not in (None, given):
            problems.append(
                f"{flag(name)} {asked}: {cluster.launcher} started this job with {given}. "
                f"Leave {flag(name)} out, or use the same number."
            )
    if (options.num_nodes or 1) > 1 and not cluster.launcher:
        problems.append(
            f"--num-nodes {options.num_nodes}: torchrun or srun has to start a job of several "
            "machines, on each machine."
        )
    return problems


def _size_problems(sizes: Mapping[str, int], tensor: int, pipeline: int) -> list[str]:
    return [
        f"{option} {ranks}: has to divide {what}, {size}. Try {_largest_divisor(size, ranks)}."
        for name, option, ranks, what in (
            ("hidden_size", "--tensor-parallel", tensor, "the width of the split layers"),
            ("num_attention_heads", "--tensor-parallel", tensor, "the number of attention heads"),
            ("num_layers", "--pipeline-parallel", pipeline, "the number of layers or parts"),
        )
        if (size := sizes[name]) % ranks
    ]


def _largest_divisor(number: int, limit: int) -> int:
    largest = min(number, limit) or 1
    return next(size for size in range(largest, 0, -1) if number % size == 0)
