"""How a refusal is measured: one printable line for each problem."""

from collections.abc import Callable

import pytest

from megakit.errors import UserError


def problems(function: Callable[..., object], *arguments: object, **options: object) -> list[str]:
    """The problems with which a call is refused, each one printable line."""
    with pytest.raises(UserError) as caught:
        function(*arguments, **options)
    for problem in caught.value.problems:
        assert len(problem.splitlines()) == 1
        assert problem.isprintable()
    return caught.value.problems


def problem(function: Callable[..., object], *arguments: object, **options: object) -> str:
    (only,) = problems(function, *arguments, **options)
    return only
