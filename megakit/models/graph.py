"""Traces a model as a list of operations, for programs without torch, such as a report's page.

The operations are traced from the torch module, so a model needs no second implementation.
`megakit/reporting/templates/graph.js` runs the list in a browser.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from megakit.errors import UserError


class UntraceableError(UserError):
    """A model uses an operation that the list of operations cannot express."""


@dataclass(frozen=True)
class Graph:
    """A traced model.

    In the operations, a value is a string that starts with `%`, a weight is its name in the model,
    a scalar is a number. Values have the shapes of the batch that the model was traced with.

    Attributes:
        module: The traced model in torch; it accepts batches of any size.
        input: The value of the model's input.
        shape: Shape of the input, with its batch dimension.
        operations: The operations in order, as dictionaries for JSON: `op` (its name), `inputs`
            (values, weights, scalars, None for an absent bias), `output` (a value), `shape` (of the
            output), and for `layer_norm` also `size` and `eps`.
        outputs: The value of each output, by the output's name.
        weights: float32 arrays by name; only weights that the operations use.
    """

    module: fx.GraphModule
    input: str
    shape: tuple[int, ...]
    operations: list[dict[str, Any]]
    outputs: dict[str, str]
    weights: dict[str, NDArray[np.float32]]

    def run(self, x: Tensor) -> dict[str, Tensor]:
        """Runs the traced module in torch; returns its outputs by name."""
        return dict(zip(self.outputs, _as_tuple(self.module(x)), strict=True))

    def description(self) -> dict[str, Any]:
        """Returns the graph without its module and its weights, as a dictionary for JSON."""
        names = ("input", "shape", "operations", "outputs")
        return {name: getattr(self, name) for name in names}


def trace(
    model: nn.Module, shape: Sequence[int], names: Sequence[str] = ("output",), **options: Any
) -> Graph:
    """Traces a plain torch module, for example from `load_for_inference`, into operations.

    Args:
        model: A model in evaluation mode, on the CPU, in float32.
        shape: Shape of the input with its batch dimension, such as (1, 1, 28, 28).
        names: Names of the outputs, in the order in which the model returns them. Surplus names are
            not used.
        **options: Further arguments of the model's `forward`; they are constants in the graph.

    Raises:
        UntraceableError: The model cannot be traced, or uses an operation that is not supported;
            the message names it.
    """
    call = _Call(model, options)
    # Random numbers, because a reordering of equal numbers could not be detected. They are not
    # drawn from the global generator.
    example = torch.rand(*shape, generator=torch.Generator().manual_seed(0))
    try:
        module = fx.GraphModule(call, _Tracer().trace(call))
        recorder = _Recorder(module)
        with torch.no_grad():
            recorder.run(example)
    except UntraceableError:
        raise
    except Exception as error:  # the model's code can raise any exception when it is traced
        raise UntraceableError(f"{type(model).__name__} cannot be traced: {error}") from error
    outputs = dict(zip(names, recorder.outputs, strict=False))
    if len(outputs) < len(recorder.outputs):
        raise UntraceableError(
            f"{type(model).__name__} returns {len(recorder.outputs)} tensors, "
            f"but only {', '.join(names)} can be used."
        )
    return Graph(
        module, recorder.input, tuple(shape), recorder.operations, outputs, recorder.weights
    )


class _Call(nn.Module):
    """Calls a model with fixed options, so that the tensor is the graph's only input."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, x: Tensor) -> Any:
        return self.model(x, **self.options)


#: torch's modules whose `forward` calls one function. The tracer records this function.
_ONE_CALL = (
    *(nn.Sequential, nn.Identity, nn.Linear, nn.Flatten, nn.Dropout, nn.LayerNorm),
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax),
)


class _Tracer(fx.Tracer):
    """Traces into all modules, except for torch's modules that call more than one function."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) not in _ONE_CALL and super().is_leaf_module(m, module_qualified_name)


#: Methods and attributes that do not depend on a tensor's values; constants in the graph.
_QUERIES = {"size", "dim", "numel", "ndimension"}
_PROPERTIES = {"shape", "ndim", "dtype", "device", "is_cuda"}
_ELEMENTWISE = {
    **{name: name for name in ("tanh", "sigmoid", "neg", "add", "sub", "mul", "div")},
    "truediv": "div",
}
#: Functions that, at least for some arguments, return the input's values in the same order.
_RESHAPES = {
    *("flatten", "reshape", "view", "unsqueeze", "squeeze", "permute", "transpose"),
    *("contiguous", "clone", "detach", "float", "to", "dropout"),
}


class _Recorder(fx.Interpreter):
    """Runs a traced module once, and records the operations on values that depend on the input."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # keeps messages short
        self.input = "%0"
        self.operations: list[dict[str, Any]] = []
        self.weights: dict[str, NDArray[np.float32]] = {}
        self.outputs: list[str] = []
        self._values: dict[fx.Node, str] = {}  # only nodes that depend on the input
        self._new: set[fx.Node] = set()  # nodes whose memory no other node shares

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node and records its operation."""
        if n.op in {"placeholder", "get_attr"} or not self._depends_on_input(n):
            result = super().run_node(n)
            if n.op == "placeholder":
                self._values[n] = self.input
            return result
        if n.op == "output":
            self.outputs = [self._reference(n, item) for item in _as_tuple(n.args[0])]
            return super().run_node(n)
        name = _name_of(n)
        record = _HANDLERS.get(name)
        if n.op == "call_module" or record is None:
            owner = f" ({n.target})".replace("model.", "", 1) if n.op == "call_module" else ""
            raise UntraceableError(f"the operation {name}{owner} is not supported.")
        result = super().run_node(n)
        if not isinstance(result, Tensor) or result.dtype != torch.float32:
            raise UntraceableError(f"the operation {_call_of(n)} does not return a float32 tensor.")
        try:
            record(self, n, result, *n.args, **n.kwargs)
        except TypeError as error:  # the function has no such parameter
            raise UntraceableError(
                f"the operation {_call_of(n)} is not supported with these arguments."
            ) from error
        return result

    def record(
        self, node: fx.Node, result: Tensor, op: str, inputs: Sequence["Value"], **settings: Any
    ) -> None:
        """Appends an operation."""
        references = [self._reference(node, item) for item in inputs]
        output = f"%{len(self.operations) + 1}"
        operation = {"op": op, "inputs": references, "output": output, "shape": list(result.shape)}
        self.operations.append(operation | settings)
        self._values[node] = output
        if op != "reshape":
            self._new.add(node)

    def record_reshape(self, node: fx.Node, result: Tensor, x: fx.Node) -> None:
        """Records a change of shape; if the shape is equal, the node gets its input's value."""
        before = self.env[x]
        if x not in self._values:
            return  # the node is a constant
        if not torch.equal(before.flatten(), result.flatten()):
            raise UntraceableError(
                f"the operation {_call_of(node)} is not supported, since it changes the numbers "
                "of its input or their order."
            )
        if before.shape == result.shape:
            self._values[node] = self._values[x]
        else:
            self.record(node, result, "reshape", [x])

    def check_in_place(self, node: fx.Node, x: fx.Node) -> None:
        """Raises an error if another operation could read the memory that this one overwrites."""
        if x not in self._new or len(x.users) > 1:
            raise UntraceableError(
                f"the operation {_call_of(node)} is not supported, since it overwrites its input "
                "and other operations may read it."
            )

    def _depends_on_input(self, node: fx.Node) -> bool:
        """Tells whether a node's result depends on the input's values, not only on its shape."""
        is_query = node.op == "call_method" and node.target in _QUERIES
        is_property = node.target is getattr and node.args[1] in _PROPERTIES
        inputs = node.all_input_nodes
        return not (is_query or is_property) and any(item in self._values for item in inputs)

    def _reference(self, node: fx.Node, item: "Value") -> Any:
        """Returns an input as operations name it: a value, a weight's name or a scalar."""
        value: object = item
        if isinstance(item, fx.Node):
            if item in self._values:
                return self._values[item]
            value = self.env[item]
        if isinstance(value, Tensor) and isinstance(item, fx.Node):
            name = str(item.target if item.op == "get_attr" else item.name).removeprefix("model.")
            self.weights[name] = value.detach().float().numpy()
            return name
        if value is None or (isinstance(value, int | float) and math.isfinite(value)):
            return value
        kind = type(value).__name__.removeprefix("immutable_")
        raise UntraceableError(f"the operation {_name_of(node)} of a {kind} is not supported.")


# Each function below records one operation. Its parameters are the recorder, the node, the node's
# result, and the parameters of torch's operation under torch's names. Other parameters of the
# operation are not supported.

Value = fx.node.Argument


def _elementwise(
    recorder: _Recorder, node: fx.Node, result: Tensor, *inputs: Value, op: str
) -> None:
    recorder.record(node, result, op, inputs)


def _activation(
    recorder: _Recorder,
    node: fx.Node,
    result: Tensor,
    input: fx.Node,
    inplace: bool = False,
    *,
    op: str,
) -> None:
    if inplace:
        recorder.check_in_place(node, input)
    recorder.record(node, result, op, [input])


def _gelu(
    recorder: _Recorder, node: fx.Node, result: Tensor, input: Value, approximate: str = "none"
) -> None:
    op = "gelu_tanh" if approximate == "tanh" else "gelu"
    recorder.record(node, result, op, [input])


def _linear(
    recorder: _Recorder,
    node: fx.Node,
    result: Tensor,
    input: Value,
    weight: fx.Node,
    bias: fx.Node | None = None,
) -> None:
    if recorder.env[weight].ndim != 2 or (bias is not None and recorder.env[bias].ndim != 1):
        raise TypeError("torch broadcasts here")
    recorder.record(node, result, "linear", [input, weight, bias])


def _layer_norm(
    recorder: _Recorder,
    node: fx.Node,
    result: Tensor,
    input: Value,
    normalized_shape: Sequence[int],
    weight: Value = None,
    bias: Value = None,
    eps: float = 1e-5,
) -> None:
    size = math.prod(normalized_shape)
    recorder.record(node, result, "layer_norm", [input, weight, bias], size=size, eps=eps)


def _softmax(
    recorder: _Recorder, node: fx.Node, result: Tensor, input: Value, dim: int, **_: Any
) -> None:
    if dim % result.ndim != result.ndim - 1:
        raise UntraceableError(f"the operation softmax over dimension {dim} is not supported.")
    recorder.record(node, result, "softmax", [input])


def _reshape(
    recorder: _Recorder, node: fx.Node, result: Tensor, input: fx.Node, *_: Any, **__: Any
) -> None:
    recorder.record_reshape(node, result, input)


_HANDLERS: dict[str, Callable[..., None]] = {
    **{name: partial(_elementwise, op=op) for name, op in _ELEMENTWISE.items()},
    **{name: partial(_activation, op=name) for name in ("relu", "silu")},
    **dict.fromkeys(_RESHAPES, _reshape),
    **{"gelu": _gelu, "linear": _linear, "layer_norm": _layer_norm, "softmax": _softmax},
}


def _name_of(node: fx.Node) -> str:
    """Returns the name of the operation that a node calls."""
    if node.op == "call_module":
        return type(node.graph.owning_module.get_submodule(str(node.target))).__name__
    if node.target is getattr:
        return str(node.args[1])
    return str(getattr(node.target, "__name__", node.target))


def _call_of(node: fx.Node) -> str:
    """Returns the text of a node's call, for a message."""
    named = [f"{name}={value}" for name, value in node.kwargs.items()]
    return f"{_name_of(node)}({', '.join([*map(str, node.args), *named])})"


def _as_tuple(output: object) -> tuple[Any, ...]:
    return tuple(output) if isinstance(output, tuple | list) else (output,)
