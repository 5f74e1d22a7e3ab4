"""Describes the inputs of a model's `forward`, and builds random examples of these inputs."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megakit.errors import UserError

if TYPE_CHECKING:
    import torch

#: The types of inputs, by torch's names.
DTYPES = ("float32", "int64", "int32", "bool")


@dataclass(frozen=True)
class ModelInput:
    """Describes a tensor that is an argument of a model's `forward`.

    Args:
        sizes: The sizes of the dimensions by name, in order. A size is a number, a pair
            (least, most), or None for any size. Dimensions of the same name have the same size,
            also in several inputs of a model.
        dtype: Torch's type by name: float32, int64, int32 or bool.
        below: Integers are at least 0 and less than this number.

    Raises:
        ValueError: A name is not an identifier, a size or the type is none of the above, or `below`
            is missing for integers.
    """

    sizes: Mapping[str, int | tuple[int, int] | None]
    dtype: str = "float32"
    below: int | None = None

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if not name.isidentifier():
                raise ValueError(f"dimension {name!r}: use a valid Python identifier.")
            least, most = size if isinstance(size, tuple) else (0, size)
            if (isinstance(size, tuple) and least < 1) or (most is not None and most <= least):
                raise ValueError(
                    f"{name} {size}: give a number above 0, None, or a pair (least, most) with "
                    "least below most."
                )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: give one of {', '.join(DTYPES)}.")
        if self.dtype.startswith("int") and not self.below:
            raise ValueError(f"{self.dtype} without below: give the number of possible integers.")

    def example(self, sizes: Mapping[str, int], generator: "torch.Generator") -> "torch.Tensor":
        """Returns random numbers: floats in [0, 1), integers in [0, below), or booleans.

        Args:
            sizes: The sizes of the dimensions that are not fixed, by name.
            generator: Draws the numbers.
        """
        import torch

        shape = [
            size if isinstance(size, int) else sizes[name] for name, size in self.sizes.items()
        ]
        if self.dtype == "float32":
            return torch.rand(shape, generator=generator)
        integers = torch.randint(self.below or 2, shape, generator=generator)
        return integers.to(getattr(torch, self.dtype))


def sample_input(shape: Sequence[int]) -> dict[str, ModelInput]:
    """Returns a float32 input: samples of a shape, in a batch of any size."""
    fixed = {f"size_{number}": size for number, size in enumerate(shape, 1)}
    return {"input": ModelInput({"batch": None, **fixed})}


def described_inputs(model: Any) -> dict[str, ModelInput] | None:
    """Returns the inputs by name that the method `export_inputs` of a model's config describes.

    Returns:
        The inputs, or None if the config has no such method.

    Raises:
        UserError: The method returns something other than inputs of the model's `forward`.
    """
    describe = getattr(model.config, "export_inputs", None)
    if describe is None:
        return None
    hook = f"{type(model.config).__name__}.export_inputs"
    try:
        inputs = describe()
    except (TypeError, ValueError) as error:
        raise UserError(f"{hook}: {error}") from error
    if not isinstance(inputs, dict) or not all(isinstance(i, ModelInput) for i in inputs.values()):
        raise UserError(f"{hook}: must return a dict of ModelInput by name.")
    parameters = list(inspect.signature(model.forward).parameters)
    if not inputs or list(inputs) != parameters[: len(inputs)]:
        raise UserError(
            f"{hook}: describes {', '.join(inputs) or 'nothing'}. Describe the first parameters of "
            f"{type(model).__name__}.forward, in order; its parameters are {', '.join(parameters)}."
        )
    ranges: dict[str, Any] = {}
    for given in inputs.values():
        for name, size in given.sizes.items():
            if ranges.setdefault(name, size) != size:
                raise UserError(
                    f"{hook}: {name} is {ranges[name]} and {size}. Dimensions of the same name "
                    "have the same size; give the dimensions two names."
                )
    return inputs


def dynamic_sizes(inputs: Mapping[str, ModelInput]) -> dict[str, tuple[int, int | None]]:
    """Returns the least and the most size of each dimension that is not fixed, by name."""
    return {
        name: size or (1, None)
        for given in inputs.values()
        for name, size in given.sizes.items()
        if not isinstance(size, int)
    }


def examples(
    inputs: Mapping[str, ModelInput], sizes: Mapping[str, int]
) -> tuple["torch.Tensor", ...]:
    """Returns a random tensor for each input; the same tensors for the same sizes.

    Args:
        inputs: The inputs of the model.
        sizes: The sizes of the dimensions that are not fixed, by name.
    """
    import torch

    generator = torch.Generator().manual_seed(sum(sizes.values()))
    return tuple(given.example(sizes, generator) for given in inputs.values())
