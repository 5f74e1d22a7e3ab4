"""Plans how a job's processes share the work, and checks the plan before the processes start."""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megakit.errors import UserError
from megakit.job.cluster import Cluster
from megakit.job.options import CommonOptions
from megakit.job.ranges import flag
from megakit.job.sizes import Sizes
from megakit.runtime.accelerator import Accelerator
from megakit.runtime.foreign_files import JSON_BYTES, read_regular_file, reading


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
        # An option may be out of its range; `CommonOptions.problems` reports it.
        return max(1, self.world_size // max(1, self.tensor * self.pipeline))

    @property
    def parallel(self) -> dict[str, int]:
        """Numbers of tensor-parallel ranks, pipeline stages and data-parallel ranks."""
        return {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}

    def __str__(self) -> str:
        return describe(self.parallel)


def describe(parallel: Mapping[str, int]) -> str:
    """Describes a layout in words, such as `2 processes: tensor 2 x pipeline 1 x data 1`."""
    number = math.prod(parallel.values())
    if number == 1:
        return "1 process"
    return f"{number} processes: " + " x ".join(f"{k} {v}" for k, v in parallel.items())


def other_layout(
    layout: Layout, options: CommonOptions, cluster: Cluster, summary: Path
) -> str | None:
    """Returns a remark if a command names another layout than that of its finished run.

    Args:
        layout: The layout that the command plans.
        options: Options of the command line. Without an option of the layout, and without a
            launcher, the command names no layout.
        cluster: The job as torchrun or srun started it.
        summary: The `summary.json` of the finished run.
    """
    names = ("devices", "num_nodes", "tensor_parallel", "pipeline_parallel")
    given = [
        name for name in names if getattr(options, name) not in (None, getattr(CommonOptions, name))
    ]
    used: dict[str, int] = {}
    with contextlib.suppress(UserError), reading(summary, ""):
        found = json.loads(read_regular_file(summary, JSON_BYTES))["parallel"]
        used = {name: int(found[name]) for name in layout.parallel}
    if not (given or cluster.launcher) or used in ({}, layout.parallel):
        return None
    return (
        f"The finished run used {describe(used)}. This command names {layout}, and trained nothing "
        "under this layout. To train under it, add --fresh or another --output-dir."
    )


def plan_layout(options: CommonOptions, cluster: Cluster, sizes: Sizes) -> tuple[Layout, list[str]]:
    """Plans the requested layout, and returns the reasons if the layout is impossible.

    Args:
        options: Options of the command line.
        cluster: The job as torchrun or srun started it.
        sizes: Sizes of the model that is split. Every number divides an unknown size, 0.

    Returns:
        The layout, and one message per problem, with the arithmetic. The layout is valid only if
        there are no problems.
    """
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
    devices = options.devices or cluster.devices
    num_nodes = options.num_nodes or cluster.num_nodes
    if num_nodes > 1 and not cluster.launcher:
        problems.append(
            f"--num-nodes {num_nodes}: torchrun or srun has to start a job of several machines, "
            "on each machine."
        )
    tensor, pipeline = options.tensor_parallel, options.pipeline_parallel
    width, num_heads = sizes.width, sizes.num_heads
    num_pipeline_stages = sizes.num_pipeline_stages
    world_size, model_parallel = devices * num_nodes, tensor * pipeline
    is_splittable = tensor >= 1 <= pipeline and not (
        num_heads % tensor or width % tensor or num_pipeline_stages % pipeline
    )
    fits = not (min(world_size, model_parallel) >= 1 and world_size % model_parallel)
    if not fits:
        problems.append(
            f"--tensor-parallel {tensor} x --pipeline-parallel {pipeline} = {model_parallel}: has "
            f"to divide the number of processes, {devices} x {num_nodes} = {world_size}."
            + (f" Use --devices {model_parallel}, for example." if is_splittable else "")
        )
    if tensor >= 1 and num_heads % tensor:
        problems.append(
            f"--tensor-parallel {tensor}: has to divide the number of attention heads, "
            f"{num_heads}. Try {_largest_divisor(num_heads, tensor)}."
        )
    elif tensor >= 1 and width % tensor:
        problems.append(
            f"--tensor-parallel {tensor}: has to divide the width of the split layers, {width}. "
            f"Try {_largest_divisor(width, tensor)}."
        )
    if pipeline >= 1 and num_pipeline_stages % pipeline:
        numbers = range(1, num_pipeline_stages + 1)
        possible = [str(number) for number in numbers if num_pipeline_stages % number == 0]
        problems.append(
            f"--pipeline-parallel {pipeline}: this model can be split into "
            f"{' or '.join(possible)} stages. "
            f"Try {_largest_divisor(num_pipeline_stages, pipeline)}."
        )
    data = max(1, world_size // max(1, model_parallel))
    global_batch_size = getattr(options, "global_batch_size", None)  # any number in prediction
    micro, batch_problems = _micro_batch_size(options, global_batch_size, data)
    if fits:  # otherwise the number of data-parallel ranks is wrong
        problems += batch_problems
    layout = Layout(devices, num_nodes, tensor, pipeline, global_batch_size or micro * data, micro)
    return layout, problems


def too_few_gpus(layout: Layout, accelerator: Accelerator, cluster: Cluster) -> list[str]:
    """Returns a message if there are fewer GPUs than processes; processes may share CPUs."""
    count = accelerator.count
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # Slurm's --gpus-per-task shows each process only its own GPU. Of several MIG devices that a
    # process may see, CUDA uses the first only.
    if count == 1 and "," not in visible:
        count = max(count, cluster.num_gpus)
    if accelerator.name == "gpu" and layout.devices > count:
        has = f"{count} GPU" + "s" * (count != 1)
        return [
            f"--devices {layout.devices}: this machine has {has}, and each process needs its own. "
            "Use fewer, or --accelerator cpu."
        ]
    return []


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
