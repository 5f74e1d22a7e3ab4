"""Runs the list of operations that a report's page holds, as `graph.js` does, but in numpy.

The tests compare both with torch. So the list and its weights are checked where there is no node.
"""

import base64
import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def _sigmoid(x: Numbers) -> Numbers:
    return 1 / (1 + np.exp(-x))


def _layer_norm(x: Numbers, weight: Any, bias: Any, size: int, eps: float) -> Numbers:
    groups = x.reshape(-1, size)
    deviation = np.sqrt(groups.var(axis=1, keepdims=True) + eps)
    groups = (groups - groups.mean(axis=1, keepdims=True)) / deviation
    groups = groups * (1 if weight is None else weight.ravel())
    return groups + (0 if bias is None else bias.ravel())


def softmax(x: Numbers) -> Numbers:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


#: What each operation has; its further settings are arguments of its function.
KEYS = {"op", "inputs", "output", "shape"}

OPERATIONS: dict[str, Any] = {
    "linear": lambda x, weight, bias: x @ weight.T + (0 if bias is None else bias),
    "layer_norm": _layer_norm,
    "softmax": softmax,
    "reshape": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x * _sigmoid(x),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "neg": np.negative,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
}


def interpret_in_numpy(text: str, inputs: Any) -> list[dict[str, list[float]]]:
    """The outputs for each input, from the text that `readGraph` of `graph.js` reads."""
    content = json.loads(text)
    graph = content["graph"]
    weights = {
        name: np.frombuffer(base64.b64decode(stored["float32"]), "<f4")
        .reshape(stored["shape"])
        .astype(np.float64)
        for name, stored in content["weights"].items()
    }
    return [_run(graph, weights, np.array(numbers, np.float64)) for numbers in inputs]


def _run(graph: Any, weights: dict[str, Numbers], x: Numbers) -> dict[str, list[float]]:
    values: dict[Any, Any] = {**weights, graph["input"]: x.reshape(graph["shape"])}
    for operation in graph["operations"]:
        settings = {name: operation[name] for name in operation.keys() - KEYS}
        named = (values[item] if isinstance(item, str) else item for item in operation["inputs"])
        result = OPERATIONS[operation["op"]](*named, **settings)
        values[operation["output"]] = result.reshape(operation["shape"])
    return {name: values[value].ravel().tolist() for name, value in graph["outputs"].items()}
