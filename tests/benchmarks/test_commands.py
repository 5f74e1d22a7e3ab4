"""Every benchmark that a page or `./run benchmarks` names exists, and says what it takes."""

import json
import re

from tests.benchmarks.conftest import BENCHMARKS
from tests.scripts import REPOSITORY, output_of

PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *BENCHMARKS.glob("*.md")]
#: Prints the help texts of scripts by name; one process is quicker than one for each.
HELP = """
import contextlib, io, json, os, runpy, sys

folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
texts = {}
for name in names:
    sys.argv = [os.path.join(folder, name), "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        runpy.run_path(sys.argv[0], run_name="__main__")
    texts[name] = printed.getvalue()
print(json.dumps(texts))
"""


def test_every_benchmark_is_there_and_says_what_it_takes(benchmark):
    listed = {one.arguments[0]: one for one in benchmark("run_all").ALL.values()}
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"benchmarks/(\w+\.py)", text)) | {"run_all.py", *listed}
    assert {"mutants.py", "pictures.py"} < named
    texts = json.loads(output_of(HELP, BENCHMARKS, *sorted(named)))
    for name, help_text in texts.items():
        assert help_text.startswith("usage: "), name
        if name in listed:
            assert "--write" in help_text, name
            assert ("--data-dir" in help_text) == listed[name].needs_images, name
