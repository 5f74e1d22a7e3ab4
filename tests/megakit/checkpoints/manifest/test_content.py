"""manifest.json: what it says comes back, and tells checkpoints apart."""

import hashlib
import json
import math
from dataclasses import asdict, replace

from megakit.checkpoints.folders import MANIFEST
from megakit.checkpoints.manifest import (
    FORMAT_VERSION,
    Manifest,
    read_manifest,
    verify,
    write_manifest,
)
from tests.megakit.checkpoints.manifest.changing import WEIGHTS


class TestManifest:
    def test_it_comes_back(self, checkpoint):
        manifest = read_manifest(checkpoint)
        assert (manifest.stage, manifest.model) == ("pretrain", "PretrainModel")
        assert (manifest.step, manifest.val_loss) == (500, 0.125)
        assert manifest.run == {"seed": 1, "lr": 1e-3, "n": None}
        assert manifest.format_version == FORMAT_VERSION == 2
        assert verify(checkpoint) == manifest

    def test_files_with_size_and_sha256(self, checkpoint):
        files = read_manifest(checkpoint).files
        weights = ["weights/.metadata", WEIGHTS, "weights/metadata.json"]
        assert list(files) == ["context/io.json", *weights]
        content = b"weights of step 500"
        assert files[WEIGHTS] == {
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }

    def test_the_digest_tells_checkpoints_apart(self, checkpoint):
        manifest = read_manifest(checkpoint)
        assert len(manifest.digest) == 64
        assert manifest.digest == Manifest(**asdict(manifest)).digest
        spoilt = {WEIGHTS: {"size": 19, "sha256": "0" * 64}}
        for other in (
            replace(manifest, step=501),
            replace(manifest, val_loss=None),
            replace(manifest, run={}),
            replace(manifest, files=spoilt),
            replace(manifest, values={"val_top": 0.5}),
            replace(manifest, higher_is_better=True),
            replace(manifest, final=True),
        ):
            assert other.digest != manifest.digest

    def test_numbers_survive_exactly(self, tmp_path):
        written = Manifest("s", "m", "d", 0, val_loss=0.1 + 0.2, run={"lr": 1 / 3})
        for values in ({}, {"val_top": 0.1 + 0.2, "val_none": math.inf}):
            written = replace(written, values=values, higher_is_better=bool(values))
            write_manifest(tmp_path, written)
            assert read_manifest(tmp_path) == written

    def test_one_from_before_there_were_further_values(self, tmp_path):
        content = {
            **{"stage": "s", "model": "m", "dataset": "d", "step": 1, "val_loss": 0.5},
            **{"run": {}, "versions": {}, "files": {}, "format_version": 2},
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        (tmp_path / MANIFEST).write_text(json.dumps(content | {"sha256": digest}))
        manifest = read_manifest(tmp_path)
        assert manifest.digest == digest
        assert (manifest.values, manifest.final) == ({}, False)
        write_manifest(tmp_path, manifest)  # and readable by the version before
        assert json.loads((tmp_path / MANIFEST).read_text()) == content | {"sha256": digest}

    def test_which_checkpoint_ends_a_run(self):
        last = Manifest("s", "m", "d", 7)
        assert last.ends(7)
        assert not last.ends(6)
        assert not last.ends(8)
        assert not last.ends(None)
        assert replace(last, final=True).ends(8)
