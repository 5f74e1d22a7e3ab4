"""The files that other programs read: citation, licence, containers."""

import hashlib
import json
import re

import yaml  # type: ignore[import-untyped]  # its stubs are not in the lock

import megakit
from tests.scripts import REPOSITORY


def test_citation():
    """What CFF 1.2.0 requires, and nothing that it does not know."""
    content = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert content["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= content.keys()
    known = {"type", "abstract", "version", "license", "keywords", "cff-version"}
    assert content.keys() <= known | {"message", "title", "authors"}
    assert content["version"] == megakit.__version__
    assert all(author.keys() == {"name"} for author in content["authors"])  # entities


def test_licence_is_the_published_text():
    digest = hashlib.sha256((REPOSITORY / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def test_dev_container():
    folder = REPOSITORY / ".devcontainer"
    text = re.sub(r"^\s*//.*$", "", (folder / "devcontainer.json").read_text(), flags=re.MULTILINE)
    content = json.loads(text)
    assert (folder / content["build"]["dockerfile"]).is_file()
    set_up, verb, *groups = content["postCreateCommand"].split()
    assert (set_up, verb) == ("./run", "setup")
    assert all((REPOSITORY / f"locks/{group}.lock").is_file() for group in groups)
    assert (
        f"useradd --create-home --shell /bin/bash {content['remoteUser']}"
        in (folder / content["build"]["dockerfile"]).read_text()
    )
    assert content["portsAttributes"].keys() == {str(port) for port in content["forwardPorts"]}


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
