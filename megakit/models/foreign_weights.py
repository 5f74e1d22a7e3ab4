"""Reads the weights of another program, renames them, and loads them into a model."""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from megakit.errors import UserError, printable, reading
from megakit.models.partial_loading import check_finite
from megakit.runtime.safe_reading import load_plain

RENAME = (
    "Rename tensors or modules with --map OLD=NEW (in Python: names={OLD: NEW}), leave them out "
    "with --skip NAME (skip=[NAME]), and set sizes with --set FIELD=VALUE (another config)."
)
#: Prefixes of DistributedDataParallel, of a Lightning module's attribute, and of torch.compile.
PREFIXES = ("module.", "model.", "_orig_mod.")


def read_weights(weights: Any) -> dict[str, Tensor]:
    """Reads a state dict, an entry `state_dict`, or the only other entry with tensors.

    No code runs in a file: torch's restricted unpickler creates tensors and plain values only.
    """
    if not isinstance(weights, Mapping):
        path = Path(weights)
        weights = load_file(path) if path.suffix == ".safetensors" else load_plain(path)
    parts = [part for part in weights.values() if isinstance(part, Mapping)]
    parts = [part for part in parts if any(isinstance(value, Tensor) for value in part.values())]
    found = [weights["state_dict"]] if "state_dict" in weights else parts or [weights]
    if len(found) != 1:
        raise ValueError(f"it has {len(found)} state dicts instead of one")
    tensors = {str(k): value for k, value in found[0].items() if isinstance(value, Tensor)}
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def rename(
    given: Mapping[str, Tensor],
    own: Collection[str],
    rules: Mapping[str, str | None],
    report: Callable[[str], None],
) -> dict[str, Tensor]:
    """Renames tensors by the rule with the longest name; the rule None leaves tensors out.

    From the names without a rule, common prefixes are removed that the model's own names lack.
    """
    rules = {old.removesuffix("."): new for old, new in rules.items()}
    renamed, others, used = [], {}, set()
    for name, tensor in given.items():
        fitting = [old for old in rules if not old or f"{name}.".startswith(f"{old}.")]
        used |= {*fitting}
        if not fitting:
            others[name] = tensor
        elif (new := rules[old := max(fitting, key=len)]) is not None:
            whole = re.sub(r"\.+", ".", f"{new}.{name.removeprefix(old)}")
            renamed.append((whole.strip("."), tensor))
    if unused := rules.keys() - used:
        raise UserError(
            f"--map, --skip: {', '.join(map(printable, sorted(unused)))}: no tensor or module has "
            "this name. Use the names of the file."
        )
    for one in PREFIXES * 2:  # one can follow another, as in `module._orig_mod.`
        is_common = others and all(name.startswith(one) for name in others)
        if is_common and not any(name.startswith(one) for name in own):
            consume_prefix_in_state_dict_if_present(others, one)
            report(f"the prefix {one} was removed from the names.")
    state = {**dict(renamed), **others}
    if len(state) < len(renamed) + len(others):
        raise UserError("--map: several tensors get the same name. Leave out all but one.")
    return state


def load_exactly(model: nn.Module, state: dict[str, Tensor], source: str) -> int:
    """Loads weights into a model; returns the number of tensors that were rounded.

    Of names that share a tensor in the model, one is enough.

    Raises:
        UserError: Weights are missing, unexpected, of another shape or another kind of number, or
            not finite in the model's type.
    """
    own: dict[str, Tensor | None] = model.state_dict()
    tensors = {name: value for name, value in own.items() if value is not None}
    twins = {tensors[name].data_ptr(): name for name in state if name in tensors}
    for name, value in tensors.items():
        if name not in state and value.data_ptr() in twins:
            state[name] = state[twins[value.data_ptr()]]
    try:
        # Megatron's layers also have entries without a tensor.
        model.load_state_dict({name: v for name, v in own.items() if v is None} | state)
    except RuntimeError as error:
        lines = [*f"{source}: {error}".expandtabs(2).splitlines(), RENAME]
        raise UserError("\n".join(map(printable, lines))) from error
    for name, value in tensors.items():
        given = state[name]
        is_same_kind = given.is_floating_point() == value.is_floating_point()
        if not (is_same_kind and given.to(value.dtype).equal(value)):
            raise UserError(
                f"{source}: {printable(name)} has numbers of {given.dtype}, which are not those of "
                f"the model ({value.dtype}; or the model shares this tensor with another one). "
                "Convert them first."
            )
    with reading(source, "Give finite weights."):
        check_finite(tensors)
    return sum(not state[name].double().equal(value.double()) for name, value in tensors.items())
