"""Replaces CUDA graphs: a capture records the operations of its thread; a replay repeats them.

As on a GPU, a capture changes no memory and no generator, communicates with no rank, and fixes
every number and every address; its results are -1 or NaN until the first replay. A replay runs no
Python code of the captured function, and its random operations draw new numbers.

A graph's copy from page-locked memory is refused: each replay would read what the host wrote last.
Memory that a graph uses is kept; a GPU may give it to other tensors, and change what they hold.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed import Work
from torch.utils import _python_dispatch, _pytree

from .machine import HOST, Machine, label_of, replace, tensors_in

_without_modes: Any = _python_dispatch._disable_current_modes
#: The methods of a CPU generator, whatever the label says.
_Generator: Any = torch._C.Generator


@functools.cache
def is_view(func: Any) -> bool:
    """Returns whether an operation only gives memory another shape."""
    is_unsafe = func._schema.name == "aten::_unsafe_view"  # one by its result only
    return func.is_view or is_unsafe or torch.Tag.inplace_view in func.tags


@dataclass
class Call:
    """A call of an operation; `generator` is the GPU's that it draws from."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    generator: Any = None

    def run(self) -> Any:
        """Computes the result on the CPU."""
        if self.generator is None or self.kwargs.get("generator") is not None:
            return self.func(*self.args, **self.kwargs)
        # A CPU kernel without a generator draws from the CPU's default generator.
        default = torch.default_generator
        before = default.get_state()
        default.set_state(_Generator.get_state(self.generator))
        try:
            return self.func(*self.args, **self.kwargs)
        finally:
            _Generator.set_state(self.generator, default.get_state())
            default.set_state(before)

    def is_number(self, tensor: Tensor) -> bool:
        """Returns whether a GPU gets a tensor's content with the call, as it gets Python's."""
        is_result = self.func._schema.is_mutable and tensor is self.args[0]
        return label_of(tensor) == HOST and not is_result

    def fixed(self) -> "Call":
        """Returns the same call with numbers and addresses of its own."""
        args, kwargs = _pytree.tree_map_only(
            Tensor,
            lambda tensor: tensor.clone() if self.is_number(tensor) else tensor.detach(),
            (self.args, self.kwargs),
        )
        return Call(self.func, args, kwargs, self.generator)


@dataclass
class Capture:
    """The operations of a graph; until its end, also what they have changed."""

    generators: list[Any]  # from which operations may draw
    is_broken: bool = False
    _calls: list[tuple[Call, list[tuple[int, Tensor]]]] = field(default_factory=list)
    # By address: memory, and its content before the capture, or None if the capture allocated it.
    _memory: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    _states: dict[Any, Tensor] = field(default_factory=dict)  # of generators before the capture

    def record(self, call: Call) -> Any:
        """Records a call; computes its result, which gives the host shapes and types."""
        for tensor in tensors_in((call.args, call.kwargs)):
            memory = tensor.untyped_storage()
            if memory._cdata not in self._memory and not call.is_number(tensor):
                self._memory[memory._cdata] = memory, memory.clone()
        if (generator := call.generator) is not None and generator not in self._states:
            if generator not in self.generators:
                raise RuntimeError("a graph draws from a generator that is not registered with it")
            self._states[generator] = _Generator.get_state(generator)
        fixed = call.fixed()
        if call.func.namespace != "c10d":
            result = call.run()
        else:  # C++ expects the tensors that receive, or those and a Work
            work = FakeWork().boxed()
            result = (call.args[0], work) if len(call.func._schema.returns) == 2 else work
        known = {*self._memory}
        made = []
        for k, tensor in enumerate(tensors_in(result)):
            if (memory := tensor.untyped_storage())._cdata not in known:
                self._memory[memory._cdata] = memory, None
                made.append((k, tensor.detach()))
        self._calls.append((fixed, made))
        return result

    def end(self) -> None:
        """Undoes the changes; destroys the results."""
        for memory, content in self._memory.values():
            memory.fill_(255) if content is None else memory.copy_(content)
        for generator, state in self._states.items():
            _Generator.set_state(generator, state)
        self._memory.clear()

    def replay(self) -> None:
        """Repeats the operations, each result in its memory."""
        for call, made in self._calls:
            result = call.run()
            for part in result if isinstance(result, tuple) else (result,):
                if call.func.namespace == "c10d" and isinstance(part, torch.ScriptObject):
                    Work.unbox(part).wait()
            again = [*tensors_in(result)]
            for k, tensor in made:
                tensor.copy_(again[k])


def replace_graphs(machine: Machine) -> None:
    """Replaces the parts of torch that `torch.cuda.graph` consists of."""
    thread = machine.thread

    class CUDAGraph:
        def __init__(self, keep_graph: bool = False) -> None:
            self._generators = [*machine.generators]
            self._capture: Capture | None = None

        def register_generator_state(self, generator: Any) -> None:
            self._generators.append(generator)

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            if thread.stream is None:
                raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
            self._capture = thread.capture = Capture(self._generators)
            machine.capture_of_all = thread.capture if capture_error_mode == "global" else None

        def capture_end(self) -> None:
            capture, thread.capture, machine.capture_of_all = thread.capture, None, None
            with _without_modes():
                capture.end()
            if capture.is_broken:
                self.reset()
                raise torch.AcceleratorError(
                    "CUDA error: operation failed due to a previous error during capture"
                )

        def replay(self) -> None:
            if self._capture is None:
                raise RuntimeError(
                    "Called CUDAGraph::replay without a preceding successful capture."
                )
            machine.counts["launches"] += 1
            with _without_modes(), torch.no_grad():
                self._capture.replay()

        def reset(self) -> None:
            self._capture = None

        def pool(self) -> tuple[int, int]:
            return (0, 1)

    functions: dict[str, Any] = {
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: thread.capture is not None,
    }
    for module in (torch.cuda, torch.cuda.graphs):
        replace(module, **functions)
