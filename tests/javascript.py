"""JavaScript run by node, for tests of a report's scripts without a browser."""

import json
import shutil
from typing import Any

import pytest

from tests.scripts import run

NODE = shutil.which("node")


def run_javascript(code: str, given: Any) -> Any:
    """Runs a script and returns the value that it sets `result` to.

    Args:
        code: The script. It finds `given` under that name.
        given: Data that JSON can hold.
    """
    if NODE is None:
        pytest.skip("no node, which runs the scripts of report.html")
    script = f"""
        let result;
        const given = {json.dumps(given)};
        {code}
        process.stdout.write(JSON.stringify(result));
    """
    return json.loads(run(NODE, "-", stdin=script, timeout=120).output())
