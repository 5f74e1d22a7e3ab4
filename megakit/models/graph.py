"""Describes a model as a list of operations, which the canvas of a page runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from megakit.errors import UserError, reason_of
from megakit.models.inference import quiet


class UntraceableError(UserError):
    """A model uses an operation that a page cannot run."""


@dataclass(frozen=True)
class Graph:
    """A model as a list of operations, which `mnist/templates/graph.js` runs.

    In the operations, a value is a string that starts with `%`, a weight is its name in the model,
    a scalar is a number. Values have the shapes of one sample in a batch of size 1.

    Attributes:
        description: For JSON: `input` (the value of the model's input) and its `shape`; the
            `operations` in order, with `op` (the name), `inputs`, `output`, `shape` (of the output)
            and for `layer_norm` also `size` and `eps`; `outputs` (values by name).
        weights: float32 arrays by name; only weights that the operations use.
        run: Computes the traced program for a batch (N, ...); returns the outputs by name.
    """

    description: dict[str, Any]
    weights: dict[str, NDArray[np.float32]]
    run: Callable[[Tensor], dict[str, Tensor]]


def trace(
    model: nn.Module, shape: Sequence[int], names: Sequence[str] = ("output",), **options: Any
) -> Graph:
    """Traces a plain module of one float32 input, for example from `load_for_inference`.

    Args:
        model: A model in evaluation mode, on the CPU, in float32.
        shape: Shape of the input with its batch dimension, such as (1, 1, 28, 28).
        names: Names of the outputs, in the order in which the model returns them.
        **options: Further arguments of the model's `forward`; they are constants in the graph.

    Raises:
        UntraceableError: The model cannot be traced, or uses an operation that is not supported;
            the message names it.
    """
    # Random numbers, because a reordering of equal numbers could not be detected.
    example = torch.rand(*shape, generator=torch.Generator().manual_seed(0))
    try:
        with quiet():
            program = torch.export.export(model, (example,), options)
            if any("_." in str(node.target) for node in program.graph.nodes):  # such as relu_
                program = program.run_decompositions({})  # without operations in place
    except Exception as error:  # the model's code can raise any exception when it is traced
        reason = reason_of(error)
        raise UntraceableError(f"{type(model).__name__} cannot be traced: {reason}") from error
    module = program.module(check_guards=False)
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    interpreter.run(example, *options.values())
    operations, outputs, weights = _operations(module.graph, interpreter.env)

    def run(x: Tensor) -> dict[str, Tensor]:
        found = torch.vmap(lambda sample: module(sample, **options))(x[:, None])
        found = found if isinstance(found, tuple) else (found,)
        return {name: each.flatten(0, 1) for name, each in zip(names, found, strict=False)}

    description = {
        "input": "%0",
        "shape": list(shape),
        "operations": operations,
        "outputs": dict(zip(names, outputs, strict=False)),
    }
    return Graph(description, weights, run)


def _operations(
    graph: fx.Graph, computed: Mapping[fx.Node, Tensor]
) -> tuple[list[dict[str, Any]], list[str], dict[str, NDArray[np.float32]]]:
    """Returns the operations, the values of the outputs, and the weights of a torch.export graph.

    Args:
        graph: The graph, with the model's input as its first placeholder.
        computed: The result of each node for an example.
    """
    operations: list[dict[str, Any]] = []
    weights: dict[str, NDArray[np.float32]] = {}
    # The nodes that depend on the input. The other placeholders are the options.
    values: dict[Any, str] = {graph.find_nodes(op="placeholder")[0]: "%0"}

    def reference(item: Any) -> Any:
        if item in values or item not in computed:
            return values.get(item, item)
        name = str(item.target) if item.op == "get_attr" else item.name
        weights[name] = computed[item].detach().float().numpy()
        return name

    for node in graph.nodes:
        is_used_operation = node.op == "call_function" and node.users
        if is_used_operation and values.keys() & set(node.all_input_nodes):
            operation, inputs, settings = _operation(node, computed)
            values[node] = f"%{len(operations) + 1}"
            made = {"output": values[node], "shape": list(computed[node].shape)}
            references = [reference(item) for item in inputs]
            operations.append({"op": operation, "inputs": references} | made | settings)
    outputs: Any = graph.output_node().args[0]
    return operations, [reference(node) for node in outputs], weights


#: torch's operations that return the numbers of their input, in some cases in another order.
RESHAPES = (
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose"),
    *("contiguous", "clone", "detach", "alias", "to", "_to_copy", "dropout"),
)
#: torch's operations, and their names and inputs on a page.
OPERATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, ("input",)) for name in ("relu", "gelu", "silu", "tanh", "sigmoid", "neg")},
    **{name: (name, ("input", "other")) for name in ("add", "sub", "mul", "div")},
    **{name: (name, ("input", "weight", "bias")) for name in ("linear", "layer_norm")},
    **dict.fromkeys(RESHAPES, ("reshape", ("input",))),
    "rsub": ("sub", ("other", "input")),
    "reciprocal": ("div", ("one", "input")),
    "softmax": ("softmax", ("input",)),
}


def _operation(
    node: fx.Node, computed: Mapping[fx.Node, Tensor]
) -> tuple[str, list[Any], dict[str, Any]]:
    """Returns a node's operation on a page: its name, inputs and settings.

    Raises:
        UntraceableError: A page cannot run the operation, or not with these arguments.
    """
    kind = getattr(node.target, "__name__", "").partition(".")[0]
    name, inputs = OPERATIONS.get(kind, ("", ()))
    given: dict[str, Any] = {"one": 1, "alpha": 1, "rounding_mode": None}
    root: Any = node.graph.owning_module
    if arguments := node.normalized_arguments(root, normalize_to_only_use_kwargs=True):
        given |= arguments.kwargs
    settings: dict[str, Any] = {}
    is_supported = bool(name) and given["alpha"] == 1 and given["rounding_mode"] is None
    if name == "layer_norm":
        settings = {"size": math.prod(given["normalized_shape"]), "eps": given["eps"]}
    elif name == "gelu" and given["approximate"] == "tanh":
        name = "gelu_tanh"
    elif name == "softmax":
        is_supported = given["dim"] in (-1, computed[node].ndim - 1)
    elif name == "reshape":
        before, after = computed[given["input"]], computed[node]
        is_supported = before.flatten().tolist() == after.flatten().tolist()
    if not is_supported:
        call = f"{kind}({', '.join(map(str, node.args))})"
        raise UntraceableError(f"the operation {call} is not supported.")
    return name, [given[name] for name in inputs], settings
