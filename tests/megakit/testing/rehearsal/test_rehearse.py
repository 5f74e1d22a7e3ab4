"""Code that is right on GPUs runs on rehearsed ones, and nothing remains at their end."""

import os
import subprocess
import sys
import textwrap
import venv

import pytest

from megakit.testing import rehearsed_environment
from megakit.testing.rehearsal.rehearse import HOOK
from tests.faults.harness import HOOK as FAULTS
from tests.megakit.testing.rehearsal.snippets import outcomes
from tests.scripts import REPOSITORY, output_of, read_json, rehearsed, run

RIGHT = {
    "all is put back": """
        import threading, torch._dynamo, torch.distributed, torch.utils._python_dispatch
        from torch.distributed import distributed_c10d
        from torch import serialization

        def attributes():
            owners = [torch, torch.cuda, torch.cuda.random, torch.accelerator, torch.Tensor]
            owners += [torch._C, torch.distributed, distributed_c10d, threading.Thread]
            registry = list(serialization._package_registry)
            found = {f"{owner}.{k}": v for owner in owners for k, v in vars(owner).items()}
            return {**found, "registry": registry}

        torch.cuda.is_available()
        before = attributes()
        with rehearse_gpu(2):
            torch.rand(3, device="cuda").cpu().numpy()
            assert attributes() != before
        after = attributes()
        changed = {k for k in before.keys() | after.keys() if before.get(k) is not after.get(k)}
        changed -= {"registry"} if after["registry"] == before["registry"] else set()
        assert changed == set(), changed
        assert not torch.cuda.is_available()
        try:
            torch.zeros(1, device="cuda")
        except (AssertionError, RuntimeError):
            pass
        else:
            raise AssertionError("the GPU has remained")
    """,
    "a second rehearsal inside is refused": """
        with rehearse_gpu():
            try:
                with rehearse_gpu():
                    pass
            except RuntimeError as error:
                assert "rehearses one, already" in str(error)
            else:
                raise AssertionError("two at once")
            assert torch.zeros(1, device="cuda").is_cuda
    """,
    "an error inside ends it": """
        try:
            with rehearse_gpu():
                raise KeyError
        except KeyError:
            pass
        assert not torch.cuda.is_available()
    """,
    "visible devices": """
        import os
        for visible, found in {
            "2,0": ["GPU 2", "GPU 0"], "": [], "5": [], "NoDevFiles": [], "1,MIG-a": ["GPU 1"]
        }.items():
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
            with rehearse_gpu(3) as counts:
                assert torch.cuda.device_count() == len(found), visible
                assert torch.cuda.is_available() == bool(found)
                for k in range(len(found)):
                    torch.zeros(1, device=f"cuda:{k}")
                assert [text[:5] for text in counts.opened] == found
                try:
                    torch.zeros(1, device=f"cuda:{len(found)}")
                except RuntimeError:
                    continue
                raise AssertionError("a GPU that is not visible")
        del os.environ["CUDA_VISIBLE_DEVICES"]
    """,
    "saved and loaded": """
        import io
        with rehearse_gpu(2):
            file = io.BytesIO()
            torch.save({"a": torch.ones(3, device="cuda:1"), "b": torch.ones(3)}, file)
            for place, expected in {None: "cuda:1", "cpu": "cpu", "cuda:0": "cuda:0"}.items():
                file.seek(0)
                found = torch.load(file, map_location=place, weights_only=True)
                assert str(found["a"].device) == expected, place
                assert str(found["b"].device) == (place or "cpu"), place
    """,
    "copies keep their device": """
        import copy
        with rehearse_gpu(2):
            model = torch.nn.Linear(3, 2).to("cuda:1")
            twin = copy.deepcopy(model)
            assert {str(p.device) for p in twin.parameters()} == {"cuda:1"}
            assert torch.equal(twin.weight, model.weight)
            assert twin.weight.data_ptr() != model.weight.data_ptr()
            twin(torch.ones(1, 3, device="cuda:1"))
    """,
    "a thread is seen": """
        import threading
        errors = []

        def add():
            try:
                torch.ones(2, device="cuda") + torch.ones(2)
            except RuntimeError as error:
                errors.append(error)

        with rehearse_gpu():
            thread = threading.Thread(target=add)
            thread.start()
            thread.join()
        assert len(errors) == 1
    """,
    "a loader's batches are page-locked": """
        data = torch.utils.data.TensorDataset(torch.arange(6.0))
        with rehearse_gpu() as counts:
            torch.zeros(1, device="cuda")
            for workers in (0, 1):
                loader = torch.utils.data.DataLoader(
                    data, batch_size=3, pin_memory=True, num_workers=workers
                )
                for (batch,) in loader:
                    assert batch.is_pinned(), workers
                    moved = batch.to("cuda", non_blocking=True)
                    assert moved.is_cuda
                    assert counts.total["synchronizations"] == 0, counts.places
            assert counts.total["copies"] == 4
            assert counts.total["bytes"] == 24 * 2
    """,
    "every form of to": """
        with rehearse_gpu(2):
            for device in ("cpu", "cuda:0", "cuda:1"):
                x = torch.ones(2, 3, device=device)
                other = torch.zeros(1, dtype=torch.float16, device="cuda:1")
                assert str(x.to(None, None, False).device) == device  # torchmetrics' form
                assert str(x.to(torch.int64).device) == device
                assert x.to(x.device) is x
                assert x.to(x.device, copy=True) is not x
                assert str(x.to(device, copy=True).device) == device
                assert str(x.to("cuda", copy=True).device) == "cuda:0"
                assert (str(x.to(other).device), x.to(other).dtype) == ("cuda:1", torch.float16)
                assert str(x.to(1).device) == str(x.cuda(1).device) == "cuda:1"
                assert str(x.to(dtype=torch.int64, device="cpu").device) == "cpu"
                assert x.to("meta").is_meta
    """,
    "random states of other processes": """
        with rehearse_gpu(2):
            torch.cuda.set_rng_state_all([])  # Lightning's, where it has found no GPU
            torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
    """,
    "random numbers of their own": """
        with rehearse_gpu(2):
            torch.manual_seed(3)
            first, second = (torch.rand(3, device=f"cuda:{k}") for k in range(2))
            assert torch.equal(first.cpu(), second.cpu())
            host = torch.get_rng_state()
            torch.rand(3, device="cuda")
            assert torch.equal(torch.get_rng_state(), host)
            torch.cuda.manual_seed_all(3)
            assert torch.equal(torch.rand(3, device="cuda").cpu(), first.cpu())
    """,
    "a step of training equals the CPU's": """
        def trained(device):
            torch.manual_seed(1)
            layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
            model = torch.nn.Sequential(*layers)
            x = torch.rand(16, 4)
            model, x = model.to(device), x.to(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                loss = (model(x) ** 2).mean()
                loss.backward()
                assert all(p.grad.device.type == device for p in model.parameters())
                optimizer.step()
            return [p.detach().cpu() for p in model.parameters()]

        expected = trained("cpu")
        with rehearse_gpu() as counts:
            found = trained("cuda")
        assert all(map(torch.equal, found, expected))
        assert counts.total["kernels"] > 30
    """,
    # The last one: its patches remain.
    "not after the patches for a CPU": """
        from megakit.runtime import cpu
        cpu.patch_torch()
        try:
            with rehearse_gpu():
                pass
        except RuntimeError as error:
            assert "Rehearse in a process of its own" in str(error)
        else:
            raise AssertionError("rehearsed all the same")
    """,
}


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return outcomes({name: textwrap.dedent(code) for name, code in RIGHT.items()})


@pytest.mark.parametrize("name", RIGHT)
def test_runs(found: dict[str, str], name: str) -> None:
    assert found[name] == "no error"


@pytest.mark.long
def test_the_report_of_a_command(tmp_path):
    """A process that opens no GPU writes none."""
    code = (
        "import subprocess, sys, torch\n"
        "subprocess.run([sys.executable, '-c', 'import torch; torch.zeros(1)'], check=True)\n"
        "x = torch.ones(2, device='cuda:1')\n"
        "x.sum().item()\n"
    )
    (tmp_path / "work.py").write_text(code)
    variables = {**rehearsed_environment(2, tmp_path / "report"), "RANK": "3"}
    subprocess.run([sys.executable, tmp_path / "work.py"], env=variables, check=True)
    (path,) = (tmp_path / "report").iterdir()
    report = read_json(path)
    assert path.stem.isdecimal()
    assert (report["rank"], report["command"]) == (3, ["work.py"])
    (opened,) = report["opened"]
    assert opened.startswith("GPU 1 at ")
    assert "work.py:3 <module>" in opened
    assert report["total"]["synchronizations"] == 1
    (wait,) = [place for place in report["places"] if place["kind"] == "synchronizations"]
    assert "work.py:4 <module>" in wait["place"]


@pytest.mark.parametrize("is_first", [False, True])
def test_each_hook_on_the_path_runs_once(tmp_path, is_first):
    (tmp_path / "sitecustomize.py").write_text("print('another hook')\n")
    hooks = [FAULTS, HOOK] if is_first else [HOOK, FAULTS]
    path = os.pathsep.join(map(str, [*hooks, tmp_path, REPOSITORY]))
    code = (
        "import sys, torch\n"
        "faults = [finder for finder in sys.meta_path if type(finder).__name__ == 'FaultAt']\n"
        "print(len(faults), torch.cuda.device_count())"
    )
    told = output_of(code, PYTHONPATH=path, REHEARSE_GPUS="2", FAULT="work:step:1 SIGKILL 0")
    assert told == "another hook\n1 2\n"


def test_the_hook_imports_no_torch():
    code = "import sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert output_of(code, **rehearsed()) == "False False\n"


def test_a_python_without_torch_is_left_alone(tmp_path):
    """Such as the system's, which a shell script starts."""
    venv.create(tmp_path / "bare")
    done = run(tmp_path / "bare" / "bin" / "python", "-c", "print('fine')", **rehearsed())
    assert (done.out, done.err) == ("fine\n", "")


def test_the_hook_alone_changes_nothing():
    changes = {**rehearsed(), "REHEARSE_GPUS": None}
    assert output_of("import torch; print(torch.cuda.is_available())", **changes) == "False\n"
