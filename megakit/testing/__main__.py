"""Checks your own dataset: `python -m megakit.testing package.module:factory`.

Exit status: 0 if the dataset keeps all rules, 1 if it breaks a rule, 2 if there is no such factory.
"""

import argparse
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m megakit.testing", description=__doc__)
    parser.add_argument(
        "factory",
        metavar="package.module:factory",
        help="a function or class that builds the dataset when called without arguments",
    )
    parser.add_argument(
        "--quick", action="store_true", help="start no other processes, which take some seconds"
    )
    options = parser.parse_args(arguments)
    try:
        factory = _find(options.factory)
    except (ImportError, AttributeError) as error:
        message = f"{options.factory!r} cannot be used: {error}. Name package.module:factory."
        print(f"{parser.prog}: {message}", file=sys.stderr)
        return 2

    from megakit.testing.datasets import assert_dataset_compatible_with_megatron

    dataset = factory()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_dataset_compatible_with_megatron(
                dataset, factory=None if options.quick else factory
            )
        for warning in caught:
            print(f"{options.factory}: warning: {warning.message}", file=sys.stderr)
    except AssertionError as error:
        print(f"{options.factory} breaks a rule: {error}", file=sys.stderr)
        return 1
    print(f"{options.factory} keeps the rules ({len(dataset)} samples).")
    return 0


def _find(name: str) -> Callable[[], Any]:
    from megakit.testing.workers import importing_nemo

    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise ImportError("it does not name a module and a function")
    module = importing_nemo(partial(importlib.import_module, module_name))
    factory: Callable[[], Any] = getattr(module, function_name)
    if not callable(factory):
        raise ImportError(f"it is a {type(factory).__name__} and not a function")
    return factory


if __name__ == "__main__":
    sys.exit(main())
