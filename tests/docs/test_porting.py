"""docs/porting.md: its imports work, and its table has every name of the documents."""

import re

import pytest

from tests.scripts import REPOSITORY

PAGE = REPOSITORY / "docs" / "porting.md"
SPEC = REPOSITORY.parent / "shared" / "spec"
NAMES = PAGE.read_text().partition("<!-- names: begin -->")[2].partition("<!-- names: end -->")[0]
RIGHT = [row.split("|")[2] for row in NAMES.splitlines() if row.startswith("| ")]
IMPORTS = sorted(
    {code for cell in RIGHT for code in re.findall(r"`((?:from|import) [^`]+)`", cell)}
)


#: What the documents' code imports from elsewhere than BioNeMo, NeMo, Megatron and Lightning.
OF_OTHERS = ("dataclasses", "torch", "torchvision", "typing", "model_components")


def names_of(document):
    """What a document defines, imports from the stack, or refers to."""
    found = set(re.findall(r"^(?: {4})?class (\w+)", document, re.MULTILINE))
    found |= set(re.findall(r"^\s*def ([a-z]\w*|_[a-z]\w+)\(", document, re.MULTILINE))
    found |= set(re.findall(r"self\.([a-z]\w*)(?:: [^=]+)? = ", document))
    found |= set(re.findall(r"^ {4}([a-z]\w+): [^=\n]+(?: = .*)?$", document, re.MULTILINE))
    found |= {path.rpartition(".")[2] for path in re.findall(r"\]\[([\w.]+)\]", document)}
    for module, names in re.findall(r"^from ([\w.]+) import +(.+)$", document, re.MULTILINE):
        if module.partition(".")[0] not in OF_OTHERS:
            found |= {name.split(" as ")[0].strip() for name in names.split(",")}
    return found - {"DataLoader"}  # torch's


@pytest.mark.skipif(not SPEC.is_dir(), reason="no ../shared/spec")
@pytest.mark.parametrize(
    "document",
    [*("mnist_tutorial", "megatron_datasets", "megatron_datamodules"), "multi_epoch_dataset_api"],
)
def test_every_name_of_the_documents_is_in_the_table(document):
    listed = {
        word
        for row in NAMES.splitlines()
        for code in re.findall(r"`([^`]+)`", row.split("|")[1] if "|" in row else "")
        for word in re.findall(r"\w+", code)
    }
    names = names_of((SPEC / f"{document}.md").read_text())
    assert len(names) > 5
    assert names <= listed, sorted(names - listed)


def test_imports_work():
    from megakit.runtime import use_accelerator

    use_accelerator("cpu")
    assert len(IMPORTS) > 15
    for code in IMPORTS:
        exec(code, {})
