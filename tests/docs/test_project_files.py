"""The files that other programs read: citation, containers."""

import json
import re

import yaml  # type: ignore[import-untyped]  # its stubs are not in the lock

import megakit
from tests.scripts import REPOSITORY


def test_citation():
    content = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert content["cff-version"] == "1.2.0"
    assert content["version"] == megakit.__version__


def test_dev_container():
    folder = REPOSITORY / ".devcontainer"
    text = re.sub(r"^\s*//.*$", "", (folder / "devcontainer.json").read_text(), flags=re.MULTILINE)
    content = json.loads(text)
    assert (folder / content["build"]["dockerfile"]).is_file()
    assert content["postCreateCommand"] == "./run setup --dev"


def test_the_image_gets_no_more_than_git_has():
    """Megabytes of data and runs, or another machine's .venv, would go into the image."""
    listed = (REPOSITORY / ".gitignore").read_text().split()
    left_out = (REPOSITORY / ".dockerignore").read_text().split()
    for pattern in listed:
        name = pattern.strip("/")
        assert {name, f"**/{name}"} & set(left_out), name


def test_the_image_copies_what_is_there():
    text = (REPOSITORY / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        for name in line.split():
            assert (REPOSITORY / name).exists(), name
