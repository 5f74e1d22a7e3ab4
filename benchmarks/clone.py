"""From clone to predictions, caches cold: README's two commands, beside pip with the same lock.

    python benchmarks/clone.py --data-dir PATH [--runs 3] [--write]

The two take turns on the same Python. Each start has a home and a folder for pip's and uv's caches
of its own, so it downloads everything, 3 GB. `--write` puts the table into RESULTS.md.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import REPOSITORY, Row, parser_of, publish
from times import Figures

PYTHON = Path(sys.base_prefix, f"bin/python3.{sys.version_info.minor}")
OURS, PIP = "git clone and ./run tutorial", "the same with pip"
TUTORIAL = {
    OURS: "./run tutorial",
    # What pip takes from a lock without resolving; the two source packages need the build's tools.
    PIP: f"{PYTHON} -m venv .venv"
    " && .venv/bin/pip install --quiet --upgrade setuptools"
    " && .venv/bin/pip install --quiet --require-hashes --no-deps --no-build-isolation"
    " -r requirements.lock"
    " && touch ready && .venv/bin/python mnist/tutorial.py",
}
#: Written when all packages are there.
READY = {OURS: ".venv/.locks/requirements.lock", PIP: "ready"}


def measure(figures: Figures, name: str, data_dir: Path) -> float:
    """Runs one way from clone to predictions; returns its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = {"HOME": folder, "PYTHON": str(PYTHON)}
        fresh |= {f"{tool}_CACHE_DIR": f"{folder}/cache/{tool}" for tool in ("PIP", "UV")}
        kept = {key: value for key, value in os.environ.items() if key != "VENV"}
        command = f"git clone -q '{REPOSITORY}' clone && cd clone && {TUTORIAL[name]}"
        began = time.time()
        done = subprocess.run(
            ["bash", "-c", f'{command} --data-dir "$0"', data_dir],
            cwd=folder,
            env=kept | fresh,
            capture_output=True,
            text=True,
        )
        seconds = time.time() - began
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr[-4000:]}")
        clone = Path(folder, "clone")
        figures.add(name, seconds)
        set_up = (clone / READY[name]).stat().st_mtime - began
        figures.add(f"{name}: until the end of the set-up", set_up)
        predictions = (clone / "runs/predict/predictions.csv").read_text()
        figures.add(f"{name}: images predicted", predictions.count("\n") - 1, "images")
        return seconds


def main() -> None:
    parser = parser_of("From clone to predictions, caches cold.")
    parser.add_argument("--runs", type=int, default=3, help="of each: 4 minutes for the two")
    options = parser.parse_args()
    data_dir = options.data_dir.absolute()
    figures, shares = Figures(), []
    for number in range(options.runs):
        first, second = (OURS, PIP) if number % 2 == 0 else (PIP, OURS)
        took = {name: measure(figures, name, data_dir) for name in (first, second)}
        shares.append(took[OURS] / took[PIP])
        each = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in took.items())
        print(f"run {number + 1}: {each}", file=sys.stderr, flush=True)
    what = "time with uv, as a share of the time with pip"
    note = "one share for each pair of runs"
    rows = [*figures.rows({}), Row(what, [100 * one for one in shares], "%", note)]
    publish("clone", "Clone to predictions", rows, options.write)


if __name__ == "__main__":
    main()
