"""The help texts that `run` prints itself: at most 80 columns wide, and without a set-up.

`tests/docs/test_inline_commands.py` asks the other verbs for theirs.
"""

import re

from tests.run.harness import start

#: The verbs, and options in their help texts.
OWN = {
    "setup": {"--download", "--wheels", "--venv"},
    "tensorboard": {"--logdir", "--port"},
    "notebook": {"--renew", "--no-browser", "--port"},
}


def test_help_of_verbs_sets_up_nothing(project):
    for verb in OWN:
        done = start(project, verb, "--help", python=None)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"usage: ./run {verb}")
        text = done.stdout
        assert [line for line in text.splitlines() if len(line) > 80] == []
        assert OWN[verb] <= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert not (project / ".venv").exists()
