"""Plans how a job's processes share the work, and checks the plan before the processes start."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from megakit.job.cluster import Cluster
from megakit.job.option_types import flag
from megakit.job.options import CommonOptions


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, by Megatron's names; 0 if unknown.

    An options class sets a size by a field, or by a class attribute for a size that no option sets;
    None stands for the size in the start checkpoint.

    Attributes:
        hidden_size: Width of the layers that tensor parallelism splits.
        num_attention_heads: Attention heads, which tensor parallelism splits, too.
        num_layers: Layers, or parts of another model, that pipeline parallelism splits.
        seq_length: Positions of a sample, such as the tokens of a text.
    """

    hidden_size: int = 0
    num_attention_heads: int = 0
    num_layers: int = 0
    seq_length: int = 1

    @classmethod
    def find(cls, options: CommonOptions, settings: Mapping[str, Any]) -> "Sizes":
        """Returns the sizes in the options, or else in the settings of a checkpoint's model."""
        sizes = {}
        for field in fields(cls):
            default = None if field.name == "hidden_size" else field.default
            size = getattr(options, field.name, default)
            size = settings.get(field.name) if size is None else size
            if type(size) is int and size >= 1:  # an option may be out of its range
                sizes[field.name] = size
        return cls(**sizes)


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

    @cached_property
    def data(self) -> int:
        """Number of data-parallel ranks, which process different samples."""
        return max(1, self.world_size // max(1, self.tensor * self.pipeline))

    @property
    def parallel(self) -> dict[str, int]:
        """Numbers of tensor-parallel ranks, pipeline stages and data-parallel ranks."""
        return {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}

    def __str__(self) -> str:
        if self.world_size == 1:
            return "1 process"
        parts = " x ".join(f"{name} {number}" for name, number in self.parallel.items())
        return f"{self.world_size} processes: {parts}"


def plan_layout(options: CommonOptions, cluster: Cluster, sizes: Sizes) -> tuple[Layout, list[str]]:
    """Plans the requested layout, and returns the reasons if the layout is impossible.

    Args:
        options: Options of the command line.
        cluster: The job as torchrun or srun started it.
        sizes: Sizes of the model that is split. Every number divides an unknown size.

    Returns:
        The layout, and one message per problem, with the arithmetic. The layout is valid only if
        there are no problems.
    """
    problems = _cluster_problems(options, cluster)
    devices = options.devices or cluster.devices
    num_nodes = options.num_nodes or cluster.num_nodes
    tensor, pipeline = max(1, options.tensor_parallel), max(1, options.pipeline_parallel)
    size_problems = _size_problems(sizes, tensor, pipeline)
    world_size, model_parallel = devices * num_nodes, tensor * pipeline
    fits = world_size % model_parallel == 0
    if not fits:
        problems.append(
            f"--tensor-parallel {tensor} x --pipeline-parallel {pipeline} = {model_parallel}: has "
            f"to divide the number of processes, {devices} x {num_nodes} = {world_size}."
            + ("" if size_problems else f" Use --devices {model_parallel}, for example.")
        )
    problems += size_problems
    data = max(1, world_size // model_parallel)
    global_batch_size = getattr(options, "global_batch_size", None)  # any number in prediction
    micro, batch_problems = _micro_batch_size(options, global_batch_size, data)
    if fits:  # otherwise the number of data-parallel ranks is wrong
        problems += batch_problems
    layout = Layout(devices, num_nodes, tensor, pipeline, global_batch_size or micro * data, micro)
    return layout, problems


def _cluster_problems(options: CommonOptions, cluster: Cluster) -> list[str]:
    problems = []
    for name in ("devices", "num_nodes"):
        asked, given = getattr(options, name), getattr(cluster, name)
        if cluster.launcher and asked not in (None, given):
            problems.append(
                f"{flag(name)} {asked}: {cluster.launcher} started this job with {given}. "
                f"Leave {flag(name)} out, or use the same number."
            )
    if cluster.num_surplus:
        problems.append(
            f"{cluster.launcher} started {cluster.num_processes} processes on {cluster.num_nodes} "
            "machines: each machine needs the same number of processes. "
            "Use --ntasks-per-node (srun), or the same --nproc-per-node everywhere (torchrun)."
        )
    if (options.num_nodes or 1) > 1 and not cluster.launcher:
        problems.append(
            f"--num-nodes {options.num_nodes}: torchrun or srun has to start a job of several "
            "machines, on each machine."
        )
    return problems


def _size_problems(sizes: Sizes, tensor: int, pipeline: int) -> list[str]:
    width, heads, layers = sizes.hidden_size, sizes.num_attention_heads, sizes.num_layers
    problems = []
    for size, what in (
        (heads, "the number of attention heads"),
        (width, "the width of the split layers"),
    ):
        if size % tensor:
            problems = [
                f"--tensor-parallel {tensor}: has to divide {what}, {size}. "
                f"Try {_largest_divisor(size, tensor)}."
            ]
            break
    if layers % pipeline:
        possible = [str(number) for number in range(1, layers + 1) if layers % number == 0]
        problems.append(
            f"--pipeline-parallel {pipeline}: this model can be split into "
            f"{' or '.join(possible)} stages. Try {_largest_divisor(layers, pipeline)}."
        )
    return problems


def _micro_batch_size(
    options: CommonOptions, global_batch_size: int | None, data: int
) -> tuple[int, list[str]]:
    asked = options.micro_batch_size
    if global_batch_size is None:
        return asked or options.largest_micro_batch, []
    if global_batch_size % data:
        return 1, [
            f"--global-batch-size {global_batch_size}: has to be a multiple of the number of "
            f"data-parallel ranks, {data}. Try {-(-global_batch_size // data) * data}."
        ]
    share = global_batch_size // data
    if asked is not None and asked >= 1 and share % asked:
        return 1, [
            f"--micro-batch-size {asked} x {data} data-parallel ranks = {asked * data}: has to "
            f"divide --global-batch-size {global_batch_size}. Try {_largest_divisor(share, asked)}."
        ]
    return asked or _largest_divisor(share, options.largest_micro_batch), []


def _largest_divisor(number: int, limit: int) -> int:
    largest = max(1, min(number, limit, 2**24))  # bounded: an option may be out of its range
    return next(size for size in range(largest, 0, -1) if number % size == 0)
