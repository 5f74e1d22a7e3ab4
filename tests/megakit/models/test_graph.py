"""Models as lists of operations: the interpreter's outputs, and what is refused by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megakit.models.graph import Graph, UntraceableError, trace
from megakit.reporting.report import INTERPRETER, embed_graph
from tests.javascript import run_javascript
from tests.megakit.models.interpreter import interpret_in_numpy

functional = nn.functional


class Layers(nn.Module):
    """Layers of many kinds, and a forward that the test chooses."""

    def __init__(self, compute: Callable[["Layers", Tensor], Any]) -> None:
        super().__init__()
        self.compute = compute
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.linear, self.bare = nn.Linear(6, 5), nn.Linear(6, 5, bias=False)
            self.norm, self.dropout = nn.LayerNorm([2, 3]), nn.Dropout(0.5)
            self.weights = nn.Parameter(torch.randn(2, 1))
            self.register_buffer("offset", torch.randn(3))
            self.convolution, self.attention = nn.Conv1d(2, 4, 1), nn.MultiheadAttention(6, 1)
            nn.init.normal_(self.norm.weight)
            nn.init.normal_(self.norm.bias)
        self.in_place, self.gelu = nn.ReLU(inplace=True), nn.GELU()

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def traced(compute: Callable[[Layers, Tensor], Any], *names: str) -> tuple[Graph, Layers]:
    model = Layers(compute).eval().requires_grad_(False)
    return trace(model, (1, 2, 3), names or ("output",)), model


Interpreter = Callable[[Graph, Tensor], dict[str, Tensor]]


@pytest.fixture(params=["numpy", "JavaScript"])
def interpret(request: pytest.FixtureRequest) -> Interpreter:
    """The outputs of the operations' list, one input at a time."""

    def run(graph: Graph, inputs: Tensor) -> dict[str, Tensor]:
        embedded = embed_graph(graph.description(), graph.weights, "model").partition(">")[2]
        text, numbers = embedded.partition("</script>")[0], inputs.flatten(1).tolist()
        if request.param == "numpy":
            found = interpret_in_numpy(text, numbers)
        else:
            found = run_javascript(
                f"{INTERPRETER.read_text()}\nresult = given.inputs.map(readGraph(given.text));",
                {"text": text, "inputs": numbers},
            )
        return {name: torch.tensor([each[name] for each in found]) for name in graph.outputs}

    return run


@pytest.mark.parametrize(
    ("compute", "operations"),
    [
        (lambda m, x: m.linear(x.flatten(1)), ["reshape", "linear"]),
        (lambda m, x: m.bare(x.view(x.shape[0], -1)), ["reshape", "linear"]),
        (lambda m, x: m.linear(x.reshape(-1, 1, x.size(1) * 3)), ["reshape", "linear"]),
        (lambda m, x: x.relu(), ["relu"]),
        (lambda m, x: m.in_place(x * 2), ["mul", "relu"]),
        (lambda m, x: m.gelu(3 * x), ["mul", "gelu"]),
        (lambda m, x: functional.gelu(3 * x, approximate="tanh"), ["mul", "gelu_tanh"]),
        (lambda m, x: torch.tanh(x) - torch.sigmoid(x), ["tanh", "sigmoid", "sub"]),
        (lambda m, x: functional.silu(-x), ["neg", "silu"]),
        (lambda m, x: m.norm(x), ["layer_norm"]),
        (lambda m, x: functional.layer_norm(x, (3,), eps=0.1), ["layer_norm"]),
        (lambda m, x: x.softmax(-1), ["softmax"]),
        (lambda m, x: functional.softmax(9 * x, dim=2), ["mul", "softmax"]),
        (lambda m, x: (x - m.offset) / 0.3 + m.weights, ["sub", "div", "add"]),
        (lambda m, x: 1 - x * torch.arange(3.0), ["mul", "sub"]),
        (lambda m, x: 2 / (x.unsqueeze(1) + m.weights[:, :, None]), ["reshape", "add", "div"]),
        (lambda m, x: x * m.offset.to(x), ["mul"]),
        (lambda m, x: m.dropout(x).contiguous().to(torch.float32) + 1, ["add"]),
    ],
)
def test_the_interpreters_compute_what_torch_does(
    compute: Callable[[Layers, Tensor], Any], operations: list[str], interpret: Interpreter
) -> None:
    graph, model = traced(compute)
    assert [operation["op"] for operation in graph.operations] == operations
    inputs = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(1))
    expected = torch.cat([model(x[None].clone()).flatten()[None] for x in inputs])
    torch.testing.assert_close(graph.run(inputs.clone())["output"].reshape(4, -1), expected)
    found = interpret(graph, inputs)["output"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.05  # else little is compared


def test_two_outputs_by_name(interpret: Interpreter) -> None:
    graph, model = traced(lambda m, x: (m.linear(x.flatten(1)), x + 1), "logits", "latent")
    x = torch.randn(3, 2, 3)
    found = interpret(graph, x)
    assert found.keys() == graph.run(x).keys() == {"logits", "latent"}
    torch.testing.assert_close(found["logits"], model(x)[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found["latent"], (x + 1).flatten(1), rtol=0, atol=1e-5)


def test_options_of_the_forward() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, twice: bool = False) -> Tensor:
            return x * 2 if twice else x.tanh()

    cases: list[tuple[dict[str, Any], str]] = [({"twice": True}, "mul"), ({}, "tanh")]
    for options, operation in cases:
        graph = trace(Model(), (1, 2), **options)
        assert [each["op"] for each in graph.operations] == [operation]


def test_only_the_weights_that_are_used() -> None:
    graph, model = traced(lambda m, x: m.linear(x.flatten(1)))
    assert graph.weights.keys() == {"linear.weight", "linear.bias"}
    assert graph.weights["linear.weight"].dtype == np.float32
    assert np.array_equal(graph.weights["linear.weight"], model.linear.weight.numpy())


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda m, x: m.convolution(x), r"operation Conv1d \(convolution\) is not supported"),
        (lambda m, x: functional.conv1d(x, m.convolution.weight), "operation conv1d is not supp"),
        (lambda m, x: m.attention(x, x, x), r"MultiheadAttention \(attention\) is not supported"),
        (lambda m, x: x.sum(), "operation sum is not supported"),
        (lambda m, x: x.mT, "operation mT is not supported"),
        (lambda m, x: x[:, 0], "operation getitem is not supported"),
        (lambda m, x: x * x.max().item(), "operation max is not supported"),
        (lambda m, x: x if x.sum() > 0 else -x, "Layers cannot be traced: .*control flow"),
        (lambda m, x: m.linear(x), "Layers cannot be traced: .*shapes cannot be multiplied"),
        (lambda m, x: x.transpose(1, 2), r"transpose\(x, 1, 2\) is not supported.*order"),
        (lambda m, x: functional.dropout(x, 0.5, True), r"dropout\(x, .*is not supported.*numbers"),
        (lambda m, x: x.softmax(1), "operation softmax over dimension 1 is not supported"),
        (lambda m, x: torch.add(x, x, alpha=2), r"add\(x, x, alpha=2\) is not supported"),
        (lambda m, x: functional.linear(x, m.offset), r"linear\(x, .*is not supported with these"),
        (lambda m, x: x + float("inf"), "operation add of a float is not supported"),
        (lambda m, x: x.to(torch.bfloat16), "does not return a float32 tensor"),
        (lambda m, x: {"x_hat": x}, "operation output of a dict is not supported"),
        (lambda m, x: (x, x), "Layers returns 2 tensors, but only output can be used"),
        # Operations in place whose input is read again:
        (lambda m, x: m.in_place(x) + x, r"relu\(x, inplace=True\) .*overwrites its input"),
        (lambda m, x: (lambda y: m.in_place(y) + y)(x + 1), "overwrites its input"),
        (lambda m, x: (lambda y: m.in_place(y.flatten(1)))(x + 1), "overwrites its input"),
    ],
)
def test_what_cannot_be_expressed_is_named(
    compute: Callable[[Layers, Tensor], Any], message: str
) -> None:
    with pytest.raises(UntraceableError, match=message) as caught:
        traced(compute)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("megatron")
def test_layers_of_megatron_in_their_plain_form(interpret: Interpreter) -> None:
    """They return two values, of which the second may be None."""
    from megakit.models.plain import replace_parallel_layers
    from tests.megakit.models.networks import Net, NetConfig

    model = Net(NetConfig(seed=1)).requires_grad_(False).eval()
    replace_parallel_layers(model)
    graph = trace(model, (1, 6))
    assert [each["op"] for each in graph.operations] == ["linear", "relu", "linear", "linear"]
    x = torch.randn(5, 6)
    torch.testing.assert_close(interpret(graph, x)["output"], model(x), rtol=0, atol=1e-6)


def test_random_numbers_stay_as_they_were() -> None:
    before = torch.get_rng_state()
    traced(lambda m, x: x + 1)
    assert torch.equal(torch.get_rng_state(), before)
