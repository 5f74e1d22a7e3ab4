"""Models as lists of operations: the interpreter's outputs, and what is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megakit.models.graph import Graph, UntraceableError, trace
from mnist.report_frame import INTERPRETER, embed_graph
from tests.left_behind import run_javascript


class Layers(nn.Module):
    """Layers of many kinds, and a forward that the test chooses."""

    def __init__(self, compute: Callable[["Layers", Tensor], Any]) -> None:
        super().__init__()
        self.compute = compute
        self.linear, self.bare = nn.Linear(6, 5), nn.Linear(6, 5, bias=False)
        self.norm, self.dropout = nn.LayerNorm([2, 3]), nn.Dropout(0.5)
        self.weights = nn.Parameter(torch.randn(2, 1))
        self.register_buffer("offset", torch.randn(3))
        self.convolution = nn.Conv1d(2, 4, 1)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.in_place, self.gelu = nn.ReLU(inplace=True), nn.GELU()

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def traced(compute: Callable[[Layers, Tensor], Any]) -> tuple[Graph, Layers]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Layers(compute).eval().requires_grad_(False)
    return trace(model, (1, 2, 3)), model


def interpret(graph: Graph, inputs: Tensor) -> Tensor:
    """The output of the operations' list in JavaScript, one input at a time."""
    embedded = embed_graph(graph.description, graph.weights, "model").partition(">")[2]
    found = run_javascript(
        f"{INTERPRETER.read_text()}\nresult = given.inputs.map(readGraph(given.text));",
        {"text": embedded.partition("</script>")[0], "inputs": inputs.flatten(1).tolist()},
    )
    return torch.tensor([each["output"] for each in found])


@pytest.mark.parametrize(
    ("compute", "operations"),
    [
        (lambda m, x: m.linear(x.flatten(1)), ["reshape", "linear"]),
        (lambda m, x: m.bare(x.view(x.shape[0], -1)), ["reshape", "linear"]),
        (lambda m, x: m.in_place(x) + x, ["relu", "add"]),  # x was overwritten
        (
            lambda m, x: m.gelu(3 * x) + functional.gelu(x, approximate="tanh"),
            ["mul", "gelu", "gelu_tanh", "add"],
        ),
        (lambda m, x: torch.tanh(x) - torch.sigmoid(x), ["tanh", "sigmoid", "sub"]),
        (lambda m, x: functional.silu(m.norm(-x)), ["neg", "layer_norm", "silu"]),
        (lambda m, x: functional.softmax(9 * x, dim=2), ["mul", "softmax"]),
        (lambda m, x: (x - m.offset) / 0.3 + m.weights, ["sub", "div", "add"]),
        (lambda m, x: 1 - x * torch.arange(3.0), ["mul", "sub"]),
        (lambda m, x: 2 / (x[:, None] + m.weights[:, :, None]), ["reshape", "add", "div", "mul"]),
        (lambda m, x: m.dropout(x).to(torch.float32) + 1, ["reshape", "reshape", "add"]),
    ],
)
def test_the_interpreter_computes_what_torch_does(
    compute: Callable[[Layers, Tensor], Any], operations: list[str]
) -> None:
    graph, model = traced(compute)
    assert [operation["op"] for operation in graph.description["operations"]] == operations
    inputs = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(1))
    expected = torch.cat([model(x[None].clone()).flatten()[None] for x in inputs])
    torch.testing.assert_close(graph.run(inputs.clone())["output"].reshape(4, -1), expected)
    torch.testing.assert_close(interpret(graph, inputs), expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.05  # else little is compared


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda m, x: m.convolution(x), r"operation conv1d\(x, convolution_weight.* not supported"),
        (lambda m, x: torch.add(x, x, alpha=2), r"operation add\(x, x\) is not supported"),
        (lambda m, x: x if x.sum() > 0 else -x, "Layers cannot be traced: .*data-dependent"),
    ],
)
def test_what_cannot_be_expressed_is_named(
    compute: Callable[[Layers, Tensor], Any], message: str
) -> None:
    with pytest.raises(UntraceableError, match=message) as caught:
        traced(compute)
    assert "\n" not in str(caught.value)
