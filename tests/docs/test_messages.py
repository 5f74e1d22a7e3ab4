"""docs/messages.md: its messages are those of the code."""

import ast
import re
from collections.abc import Iterator

from tests.docs.pages import read_page
from tests.scripts import REPOSITORY

PAGE = read_page("docs/messages.md")
#: Where the page names messages: in headings, first cells of a table, and the begin of an item.
PLACES = re.compile(r"^(?:###(.*)|\| (`.*?) \||- (`[^`]*`(?:`[^`]*`|[^:`\n])*))", re.MULTILINE)

#: Messages of Python, frameworks and tools.
FOREIGN = {
    "No module named 'nemo'",
    *("No module named 'bionemo'", "KeyError: 0", "IndexError: list index out of range"),
    "unsupported operand type(s) for -: 'float' and 'NoneType'",
    "integer division or modulo by zero",
    "An attempt has been made to start a new process before",
    "/usr/bin/env: 'bash\\r': No such file or directory",
    "set: pipefail: invalid option name",
    "No space left on device",
    "address already in use",
    # uv and pip
    "Failed to fetch:",
    "Could not find a version that satisfies the requirement uv==...",
    "invalid peer certificate: UnknownIssuer",
    "has no wheels with a matching platform tag",
    # TensorBoard
    # torch and gloo
    "The NVIDIA driver on your system is too old",
    "Found no NVIDIA driver on your system",
    "ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
    "CUDA out of memory. Tried to allocate",
    "unable to allocate shared memory(shm)",
    "DataLoader worker (pid(s) ...) exited unexpectedly",
    "Default process group has not been initialized",
    "Unable to find address for",
    "mat1 and mat2 shapes cannot be multiplied",
    "len() of a 0-d tensor",
    "too many indices for tensor of dimension 0",
    "grad_output[0] has a shape of",
    "Missing key(s) in state_dict",
    "terminate called without an active exception",
    *("Connection closed by peer", "Connection reset by peer"),
    "Watchdog caught collective operation timeout",
    "malloc(): unaligned tcache chunk detected",
    # Lightning, NeMo and Megatron
    "No supported gpu backend found!",
    "Failed to extract optimizer config from module.",
    *(f"couldn't find attribute {name}" for name in ("model_type", "config", "set_input_tensor")),
    *(f"has no attribute '{name}'" for name in ("set_input_tensor", "data_sampler")),
    *(f"has no attribute '{name}'" for name in ("calculate_per_token_loss", "ddp_config")),
    "parallel group is not initialized",
    "num_microbatches is not set",
    *("is not divisible by", "is not divisible by micro batch size"),
    "must be a multiple of tensor_model_parallel_size",
    "pipeline_dtype must be specified",
}


def messages() -> set[str]:
    """The messages that the page explains; a name without a space is none."""
    places = ["".join(found) for found in PLACES.findall(PAGE)]
    spans = [span for place in places for span in re.findall(r"`([^`]+)`", place)]
    return {span for span in spans if " " in span}


def literals() -> Iterator[str]:
    """The texts in the project's code; what an f-string computes is left out."""
    for folder in ("megakit", "mnist"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [getattr(part, "value", None) for part in node.values]
                    yield "".join(part if isinstance(part, str) else "..." for part in parts)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
    for name in ("run", "run_setup.sh"):
        yield re.sub(r'" \\\n *"', " ", (REPOSITORY / name).read_text())


def test_own_messages_are_those_of_the_code() -> None:
    texts = "\n".join(literals())
    found = messages()
    missing = {m for m in found if not all(part in texts for part in m.split("..."))}
    assert len(found - missing) > 10
    assert missing == FOREIGN
