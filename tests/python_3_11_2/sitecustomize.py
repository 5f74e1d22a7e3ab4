"""Makes a Python pickle an Enum's member as Python 3.11.2, that of Debian 12, does.

Python imports a module of this name, found on PYTHONPATH, before anything else.
"""

import enum
from typing import Any


def _by_name(self: enum.Enum, protocol: Any) -> tuple[Any, ...]:
    return getattr, (self.__class__, self._name_)


enum.Enum.__reduce_ex__ = _by_name  # type: ignore[assignment,method-assign]
