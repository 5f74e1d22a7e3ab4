"""A program with torch's own count of what its first step communicates: COUNTED=FOLDER counted.py.

Collectives are those that torch's flight recorder has seen in gloo's own code, with their group;
sends and receives are events of torch's profiler.
"""

import json
import math
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from torch import distributed
from torch.distributed import distributed_c10d
from torch.profiler import ProfilerActivity, profile

c10d: Any = distributed_c10d
KINDS = {"all_gather": "all-gather", "all_reduce": "all-reduce", "broadcast": "broadcast"}
calls = 0
before = 0
profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)


def entries():
    return json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]  # type: ignore[attr-defined]


def collectives():
    """Kind, ranks and bytes of each collective of several ranks in the first step."""
    for entry in entries()[before:]:
        group = c10d._resolve_process_group(entry["process_group"][0])
        if group.size() > 1:
            shapes, (dtype,) = entry["output_sizes"], entry["output_dtypes"]
            size = sum(math.prod(shape) for shape in shapes) * {"Float": 4, "Int": 4}[dtype]
            kind = KINDS[entry["profiling_name"].removeprefix("gloo:")]
            yield kind, distributed.get_process_group_ranks(group), size


def messages():
    """Kind and bytes of each send and receive in the first step."""
    for event in profiler.events() or ():
        if event.name in ("gloo:send", "gloo:recv"):
            yield event.name[5:], 4 * math.prod(event.input_shapes[0])


def counting(schedule):
    def call(*args, **kwargs):
        global calls, before
        calls += 1
        if calls == 1:
            before = len(entries())
            profiler.__enter__()
        else:
            profiler.__exit__(None, None, None)
            found = {"collectives": [*collectives()], "messages": [*messages()]}
            file = Path(os.environ["COUNTED"], f"{os.environ['RANK']}.json")
            file.write_text(json.dumps(found))
        return schedule(*args, **kwargs)

    return call


for name in [name for name in vars(schedules) if name.startswith("forward_backward_")]:
    setattr(schedules, name, counting(getattr(schedules, name)))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
