"""The names of checkpoints, and where their weights lie."""

import pytest

from megakit.checkpoints.folders import checkpoint_name, list_checkpoints, step_of, weights_folder


class TestNames:
    @pytest.mark.parametrize(("step", "name"), [(500, "step=000500"), (12345678, "step=12345678")])
    def test_steps(self, tmp_path, step, name):
        assert checkpoint_name(step) == name
        assert step_of(tmp_path / name) == step

    @pytest.mark.parametrize("name", ["step=5", "damaged-step=000500"])
    def test_other_names(self, tmp_path, name):
        with pytest.raises(ValueError, match="step=000500"):
            step_of(tmp_path / name)

    def test_oldest_first_by_number(self, tmp_path):
        names = ["step=1000000", "step=000009", "step=999999", "step=000010"]
        for name in (*names, ".step=000011", "damaged-step=000012", "step=000013.2"):
            (tmp_path / name).mkdir()
        (tmp_path / "step=000014").write_text("a file")
        assert [step_of(path) for path in list_checkpoints(tmp_path)] == [9, 10, 999999, 1000000]
        assert list_checkpoints(tmp_path / "nothing") == []

    def test_weights_lie_below_or_at_the_top(self, checkpoint, tmp_path):
        assert weights_folder(checkpoint) == checkpoint / "weights"
        (tmp_path / "old").mkdir()
        assert weights_folder(tmp_path / "old") == tmp_path / "old"
