"""Runs pieces of code in one process that has not applied the patches for a CPU."""

import json

from tests.scripts import output_of

_RUN = """
import json, os, sys, warnings
import torch
from megakit.testing import rehearse_gpu

def outcome(name, code):
    try:
        exec(compile(code, name, "exec"), {"torch": torch, "rehearse_gpu": rehearse_gpu})
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

warnings.simplefilter("ignore")
print(json.dumps({name: outcome(name, code) for name, code in json.loads(sys.argv[1]).items()}))
"""


def outcomes(snippets: dict[str, str]) -> dict[str, str]:
    """Each snippet's error by its name, `TYPE: MESSAGE`, or `no error`."""
    found: dict[str, str] = json.loads(output_of(_RUN, json.dumps(snippets)))
    return found
