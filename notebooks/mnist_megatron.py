# %% [markdown]
# # What NeMo and Megatron ask of a model
#
# An autoencoder learns to squeeze MNIST's digits into three numbers, its trunk becomes a
# classifier, and the classifier reads the test images. That takes a minute or two on two CPU cores,
# and all of it goes through NVIDIA NeMo 2 and Megatron-Core: the same engine, the same strategy,
# the same checkpoints with which language models are trained on thousands of GPUs.
#
# The model is small so that you can look at every part. Each section says what the frameworks
# demand and why, does it in a short cell, and shows it in a picture or a number of this very run.
# The code under study is in `model_components.py`; nothing is copied here. Allow an hour, and
# change things as you go.
#
# Run the cells from top to bottom. Those that train go on where they were if you stop them (■) and
# run them again.

# %%
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

# VS Code and Jupyter say where this file is; else the folder that Python was started in counts.
place = globals().get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME", "")
folders = [*Path(place).parents, Path.cwd(), *Path.cwd().parents]
ROOT = next(folder for folder in folders if (folder / "model_components.py").is_file())
sys.path.insert(0, str(ROOT))

DATA_DIR = Path(os.environ.get("MNIST_DATA_DIR") or ROOT / "data")  # holds MNIST/raw
RUNS = Path(os.environ.get("NOTEBOOK_RUNS") or tempfile.mkdtemp())  # gets checkpoints and metrics

# %% [markdown]
# NeMo and Megatron take for granted that there is an NVIDIA GPU. `import_stack` imports them, and
# where there is none it replaces the functions of theirs that would ask for it. What is replaced,
# on a CPU and elsewhere, stands in `megakit/runtime`, each with its reason.

# %%
from megakit.job.interactive import import_stack, open_run
from mnist.sizes import SizeOptions

import_stack(width=SizeOptions.hidden_size)

import lightning.pytorch as pl
import matplotlib.pyplot as plt
import numpy as np
import torch
from nemo import lightning as nl

from megakit.models.loading import load_model_weights, num_parameters
from megakit.training import build_trainer, cosine_annealing, megatron_adam, train

plt.rcParams |= {"figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}

# %%
from mnist.files import find_dataset

DATASET = find_dataset(DATA_DIR, "auto", report=print)
print(f"Trained and tested with: {DATASET}")

# %% [markdown]
# # 1. Pretrain
#
# ## A dataset is a function of the index
#
# In plain PyTorch a `DataLoader` shuffles, and a random transform draws from a global generator.
# Megatron forbids both. The ranks that share one model each read the data for themselves, and
# nobody compares what they read: for index *i* all must get the same sample. And a run that goes
# on after a stop must get the sample that it would have got. So samples are read in sequence, 0,
# 1, 2, ..., and everything random, the order within each epoch and the pixels that are dropped, is
# *computed* from (seed, epoch, index).
#
# Our task in pretraining is to restore images of which a fifth of the pixels is missing, others in
# each epoch:

# %%
from megakit.data import EpochIndex
from model_components import MNISTDataModule
from model_pretrain import PRETRAIN, PretrainOptions

MICRO_BATCH = 32  # samples per forward pass; the global batch of a step has 128
options = PretrainOptions(
    data_dir=DATA_DIR,
    dataset=DATASET,
    output_dir=RUNS,
    max_steps=600,
    micro_batch_size=MICRO_BATCH,
    val_interval=100,
)
data = MNISTDataModule(
    DATA_DIR,
    batch_size=MICRO_BATCH,
    dataset=DATASET,
    global_batch_size=options.global_batch_size,
    corruption=options.corruption,
)
data.setup("fit")
print("Places 0 to 7 of the training:", [int(data.mnist_train[i]["idx"]) for i in range(8)])


# %%
def show_images(images: Iterable, titles: Iterable[str] = (), columns: int = 12) -> None:
    """Draws images (28, 28) in rows, dark on white."""
    pictures = list(images)
    rows, size = -(-len(pictures) // columns), 9 / columns
    _, axes = plt.subplots(rows, columns, figsize=(9, rows * (size + 0.4 * bool(titles))))
    for ax, image in zip(axes.flat, pictures, strict=False):
        ax.imshow(image, cmap="gray_r", vmin=0, vmax=1)
    for ax, title in zip(axes.flat, titles, strict=False):
        ax.set_title(title, fontsize=9)
    for ax in axes.flat:
        ax.set_axis_off()
    plt.show()


# %%
epochs = data.mnist_train.dataset  # indexed by (epoch, index), before they are strung together
views = [epochs[EpochIndex(epoch, 7)] for epoch in (0, 1, 2, 0)]
shown = [views[0]["data"][0], *(view["corrupted"][0] for view in views)]
titles = ["image 7", "epoch 0", "epoch 1", "epoch 2", "epoch 0 again"]
show_images(shown, titles, columns=7)

# %% tags=["numbers"]
{
    "pixels that differ, epoch 0 and 1": int((shown[1] != shown[2]).sum()),
    "pixels that differ, epoch 0 twice": int((shown[1] != shown[4]).sum()),
}

# %% [markdown]
# ## A config builds the model late
#
# With several ranks, a layer must know which part of the weights is its own before it can be
# built, and that is known only when the strategy has started the ranks. So NeMo is not given a
# model but a config, here `PretrainConfig`. It says which class and which loss belong together,
# and the strategy calls its `configure_model` when the time has come. Until then the Lightning
# module is empty.
#
# The batch sizes come from the data module's `data_sampler`, for which the strategy looks. A
# *micro* batch is what one rank pushes through the model at once; a *global* batch is what one
# optimizer step sees, gathered over micro batches and over ranks.

# %%
from model_components import BionemoLightningModule, PretrainConfig


def build_module(options: PretrainOptions) -> BionemoLightningModule:
    """The autoencoder's module, with its optimizer and its learning rate's schedule."""
    return BionemoLightningModule(
        config=PretrainConfig(seed=options.seed),
        optimizer=megatron_adam(options.lr, cosine_annealing(options.max_steps)),
    )


module = build_module(options)
parameters_before = num_parameters(module)


# %% [markdown]
# ## The strategy calls the steps
#
# In plain PyTorch your loop calls `loss.backward()`. Here Lightning's loop asks NeMo's
# `MegatronStrategy` for a step, that asks Megatron's schedule, and the schedule runs forward and
# backward over the micro batches, in the order that the pipeline needs. It calls the module's
# `training_step` once for each micro batch, and wants the model's *output* from it, not a loss:
# the loss is an object of its own, which only the last pipeline stage calls.
#
# NeMo tells callbacks of these events, and this one writes down what happens in the first step.
# (Where nobody listens, our strategy spares itself the telling and goes to the schedule directly.)

# %%
class Witness(pl.Callback):
    """Writes down the first step, event by event."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_start(self, *args: object) -> None:
        self.seen.append("Lightning's loop asks the strategy for a step")

    def on_megatron_microbatch_start(self, batch: dict) -> None:
        self.seen.append(f"  the schedule takes a micro batch {tuple(batch['data'].shape)}")

    def on_megatron_microbatch_end(self, output: dict) -> None:
        shapes = {name: tuple(value.shape) for name, value in output.items()}
        self.seen.append(f"    training_step returned {shapes}")

    def on_megatron_reduce_microbatches_end(self, microbatch_outputs: list, reduced: float) -> None:
        losses = " ".join(f"{float(report['avg']):.5f}" for report in microbatch_outputs)
        self.seen.append(f"  the loss reduces {losses} to {float(reduced):.5f}")


# %%
module, witness = build_module(options), Witness()
with open_run(PRETRAIN, options) as run:  # checks the options, locks the folder of the run
    trainer = build_trainer(run)  # a nemo.lightning.Trainer with our strategy and callbacks
    trainer.callbacks.append(witness)
    resume = nl.AutoResume(resume_from_path=run.plan.resume) if run.plan.resume else None
    train(model=module, data=data, trainer=trainer, resume=resume)

print("strategy:", " < ".join(kind.__name__ for kind in type(trainer.strategy).__mro__[:2]))
print(*witness.seen[:10], sep="\n")


# %% [markdown]
# Four micro batches of 32 are the global batch of 128, and one step of the optimizer. Here are all
# 600 steps:

# %%
def metrics(run: str) -> np.ndarray:
    """The rows of a run's metrics.csv, by the names of its columns; NaN where not measured."""
    return np.genfromtxt(RUNS / run / "metrics.csv", delimiter=",", names=True)


def draw_curves(run: str, quantity: str) -> None:
    """Training and validation loss; what lies far above the last is cut off."""
    rows = metrics(run)
    _, ax = plt.subplots(figsize=(7, 2.6))
    for name, style in (("train_loss", "-"), ("val_loss", "o--")):
        known = rows[~np.isnan(rows[name])]
        ax.plot(known["step"], known[name], style, label=name)
    ax.set(xlabel="optimizer step", ylabel=quantity, ylim=(0, 4 * rows["val_loss"][-1]))
    ax.legend(frameon=False)
    plt.show()


draw_curves("pretrain", "mean squared error")

# %% tags=["numbers"]
{
    "parameters before training": parameters_before,
    "parameters after": num_parameters(module),
    "val_loss": round(float(metrics("pretrain")["val_loss"][-1]), 4),
}

# %% [markdown]
# ## A loss has a `reduce`
#
# A step is several micro batches on several ranks. So a loss is an object with two methods:
# `forward` gives the loss of one micro batch to backpropagate, and a small report; `reduce` makes
# one number of all reports, over micro batches and data-parallel ranks. Whatever the cut into
# micro batches, the number must be the same:

# %% tags=["numbers"]
from megakit.data import fetch_batch
from model_components import MSELossReduction

checkpoint = Path(trainer.checkpoint_callback.best_model_path)
autoencoder = PretrainConfig(initial_ckpt_path=str(checkpoint)).configure_model()
loss = MSELossReduction()
reports = {}
for size in (128, 64, 32):
    batches = [fetch_batch(data.mnist_val, np.arange(i, i + size)) for i in range(0, 128, size)]
    with torch.no_grad():
        reports[size] = [loss.forward(batch, autoencoder(batch["data"]))[1] for batch in batches]
{f"micro batches of {size}": round(float(loss.reduce(reports[size])), 6) for size in reports}

# %% [markdown]
# ## A checkpoint has a context
#
# `torch.save` writes tensors as one process holds them. A distributed checkpoint (`weights/`)
# names each tensor, its whole shape and which part lies in which file, so that any other layout
# can read it. Beside it lies the *context*, the settings of the model's config: whoever opens the
# folder can build the model without knowing its sizes. That is how `configure_model` above knew
# them. `manifest.json` is ours: it says that the checkpoint is complete, and how good it is.

# %%
from megakit.checkpoints import read_manifest, read_model_settings

for file in sorted(checkpoint.rglob("*")):
    if file.is_file():
        print(f"{file.stat().st_size:>9,}  {file.relative_to(checkpoint.parent)}")

settings, manifest = read_model_settings(checkpoint), read_manifest(checkpoint)
print("\ncontext: ", {name: settings[name] for name in ("hidden_size", "latent_size")})
print("manifest:", {name: getattr(manifest, name) for name in ("model", "step", "val_loss")})

# %% [markdown]
# # 2. Look at reconstructions
#
# Three numbers for 784 pixels: enough for the rough shape, not always for the right digit. The
# upper row is given, with a fifth of its pixels dropped; the lower one is what the model makes of
# it.

# %%
samples = torch.stack([epochs[EpochIndex(9, i)]["corrupted"] for i in range(12)])
with torch.no_grad():
    restored = autoencoder(samples)["x_hat"].reshape(-1, 28, 28)
show_images([*samples[:, 0], *restored])

# %% [markdown]
# # 3. Fine-tune
#
# The classifier has the same trunk and another head. What it shall *not* take over from the
# checkpoint is named, here the head by the beginning of its name, and any other difference is an
# error: a weight that fails to load without a word is an easy way to fine-tune nothing.

# %% tags=["numbers"]
from model_components import ExampleFineTuneConfig

fresh = ExampleFineTuneConfig().configure_model()
left = load_model_weights(fresh, checkpoint, skip={"digit_classifier"})
print("not loaded:", ", ".join(left))
trunk, theirs = dict(fresh.named_parameters()), dict(autoencoder.named_parameters())
{
    "weights taken over": sum(
        torch.equal(trunk[key], theirs[key]) for key in trunk if key in theirs
    ),
    "weights of the trunk": sum(key in theirs for key in trunk),
}

# %% [markdown]
# From here on the script's own function does the work, as `./run finetune` would: it builds
# `ExampleFineTuneConfig` with the checkpoint's path and this prefix to skip, and trains. The
# Lightning module is the same as before, since model and loss are the config's.

# %%
from model_finetune import FINETUNE, FinetuneOptions, finetune

finetune_options = FinetuneOptions(
    data_dir=DATA_DIR,
    dataset=DATASET,
    output_dir=RUNS,
    max_steps=1000,
    val_interval=200,
    save_interval=500,
)
with open_run(FINETUNE, finetune_options) as run:
    classifier_checkpoint = finetune(run)
draw_curves("finetune", "cross entropy")

# %% tags=["numbers"]
{"val_loss": round(float(metrics("finetune")["val_loss"][-1]), 4)}

# %% [markdown]
# # 4. Predict
#
# Predicting goes through the strategy as well, since the model may be cut. Two things go wrong
# easily here: the last batch is incomplete, and with several ranks each has a part of the images
# in an order of its own. So each output travels with the index of its image, the last batch is
# filled up and a `loss_mask` says with what, and at the end each image has to be there exactly
# once.

# %%
from model_predict import PREDICT, PredictOptions, predict

predict_options = PredictOptions(data_dir=DATA_DIR, dataset=DATASET, output_dir=RUNS)
with open_run(PREDICT, predict_options) as run:
    table = np.loadtxt(predict(run), delimiter=",", skiprows=1)
idx, label, prediction = table[:, :3].astype(int).T
probabilities = table[:, 3:]

# %% tags=["numbers"]
{
    "rows": len(idx),
    "different images": len(set(idx)),
    "accuracy": round(float((label == prediction).mean()), 4),
}

# %% [markdown]
# # 5. Look at mistakes
#
# Rows are what an image is, columns what it was taken for; right ones are left out of the colours.

# %%
counts = np.zeros((10, 10), int)
np.add.at(counts, (label, prediction), 1)
wrong = counts - np.diag(counts.diagonal())
_, ax = plt.subplots(figsize=(4.6, 4.6))
ax.imshow(wrong, cmap="Oranges")
for (row, column), count in np.ndenumerate(counts):
    color = "white" if wrong[row, column] > wrong.max() / 2 else "black"
    ax.text(column, row, count or "", ha="center", va="center", fontsize=8, color=color)
ax.set(xlabel="prediction", ylabel="label", xticks=range(10), yticks=range(10))
ax.tick_params(length=0)
ax.spines[:].set_visible(False)
plt.show()

# %% [markdown]
# These are the mistakes that the classifier was surest of: label → prediction, and its probability.

# %%
data.setup("predict")
sureness = probabilities.max(axis=1)
worst = [i for i in np.argsort(-sureness) if label[i] != prediction[i]][:20]
titles = [f"{label[i]} → {prediction[i]}\n{sureness[i]:.1%}" for i in worst]
show_images([data.mnist_test[idx[i]]["data"][0] for i in worst], titles, columns=10)

# %% [markdown]
# And here is where the test images lie, by their three numbers *z*, before and after fine-tuning.
# Pretraining puts together what looks alike, fine-tuning what is called alike.

# %%
classifier = ExampleFineTuneConfig(initial_ckpt_path=str(classifier_checkpoint)).configure_model()
batch = fetch_batch(data.mnist_test, np.arange(300 if DATASET == "digits" else 2000))
fig = plt.figure(figsize=(9.5, 4.5), layout="tight")
for side, net in enumerate((autoencoder, classifier), start=1):
    with torch.no_grad():
        z = net.linear2(net.relu(net.linear1(batch["data"].flatten(1))[0]))[0].numpy()
    ax = fig.add_subplot(1, 2, side, projection="3d")
    ax.scatter(*z.T, c=batch["label"], cmap="tab10", s=3, alpha=0.6)
    for digit in range(10):
        ax.text(*np.median(z[batch["label"] == digit], axis=0), str(digit), weight="bold", size=12)
    ax.set(title=type(net).__name__, xticklabels=[], yticklabels=[], zticklabels=[])
plt.show()

# %% [markdown]
# # 6. Break the dataset's contract
#
# Section 1 said that a dataset has to be a function of the index. Nothing stops you from writing
# one that is not, and nothing complains: two ranks that share a model then train on nonsense
# without an error. This one draws its noise as many tutorials do:

# %%
from typing import Any


class Noisy(torch.utils.data.Dataset):
    """Adds noise from torch's global generator."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        sample = self.dataset[index]
        return {**sample, "data": sample["data"] + 0.3 * torch.rand(1, 28, 28)}


# %%
views = []
for rank in range(2):
    torch.manual_seed(rank)  # what it has come to on this rank, by whatever was drawn before
    views.append(Noisy(data.mnist_test)[0]["data"][0])
titles = ["rank 0", "rank 1", "difference"]
show_images([*views, (views[0] - views[1]).abs()], titles, columns=6)

# %% [markdown]
# `assert_dataset_compatible_with_megatron` finds out in milliseconds, and says what to do. A seed
# does not help if it goes to the global generator, nor does a generator of one's own that goes on
# from sample to sample:

# %%
import textwrap

from megakit.testing import assert_dataset_compatible_with_megatron


class Seeded(Noisy):
    """Seeds the global generator first: repeatable, but Megatron draws from that generator, too."""

    def __getitem__(self, index: int) -> dict:
        torch.manual_seed(index)
        return super().__getitem__(index)


class OwnGenerator(Noisy):
    """Has a generator of its own, which goes on from one sample to the next."""

    rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> dict:
        sample = self.dataset[index]
        return {**sample, "data": sample["data"] + self.rng.random((1, 28, 28))}


# %%
for broken in (Noisy, Seeded, OwnGenerator):
    try:
        assert_dataset_compatible_with_megatron(broken(data.mnist_test))
    except AssertionError as error:
        print(f"{broken.__name__}:\n{textwrap.fill(str(error), 95)}\n")

# %% [markdown]
# The remedy is the one of section 1: take random numbers from (seed, epoch, index). Such a dataset
# passes:

# %%
from megakit.data import sample_generator


class Repeatable(Noisy):
    """Draws from a generator that is made for this sample."""

    def __getitem__(self, index: int) -> dict:
        sample, rng = self.dataset[index], sample_generator(42, 0, index)
        noise = torch.from_numpy(rng.random((1, 28, 28), dtype=np.float32))
        return {**sample, "data": sample["data"] + 0.3 * noise}


assert_dataset_compatible_with_megatron(Repeatable(data.mnist_test))
assert_dataset_compatible_with_megatron(epochs)  # the one that we trained on
print("Both keep the rules.")

# %% [markdown]
# # 7. Stop and resume
#
# Long runs are stopped: by a time limit, by maintenance, by you. Resuming *exactly* is what all
# the demands above add up to: a dataset that knows sample number *n* without having read those
# before it, a sampler that remembers how many were consumed, and a checkpoint with the optimizer's
# state and the schedule. Here is a run of 100 steps, and the same run stopped at step 50 as if by
# Ctrl-C, and started again:

# %%
import hashlib
import signal
from dataclasses import fields, replace

from megakit.errors import Stopped

short = replace(options, max_steps=100, precision="32", val_interval=50, save_interval=100)


class StopAt(pl.Callback):
    """Presses Ctrl-C after a given step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        if trainer.global_step == self.step:
            signal.raise_signal(signal.SIGINT)


# %%
def run_to(name: str, stop_at: int | None = None) -> Path:
    """Pretrains for 100 steps, or goes on with it; returns the last checkpoint."""
    with open_run(PRETRAIN, replace(short, output_dir=RUNS / name)) as run:
        trainer = build_trainer(run)
        trainer.callbacks.append(StopAt(stop_at))
        resume = nl.AutoResume(resume_from_path=run.plan.resume) if run.plan.resume else None
        train(model=build_module(short), data=data, trainer=trainer, resume=resume)
    return Path(trainer.checkpoint_callback.last_model_path)


whole = run_to("whole")
try:
    run_to("stopped", stop_at=50)
except Stopped as stop:
    print(f"Stopped: {stop}")
resumed = run_to("stopped")


# %%
def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All weights of a pretraining checkpoint, loaded into a fresh model."""
    model = PretrainConfig(initial_ckpt_path=str(checkpoint)).configure_model()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def digest(checkpoint: Path) -> str:
    """A fingerprint of all weights, bit by bit."""
    bits = b"".join(weight.numpy().tobytes() for weight in weights(checkpoint).values())
    return hashlib.sha256(bits).hexdigest()[:32]


print(digest(whole), "never stopped")
print(digest(resumed), "stopped at step 50, and resumed")

# %% tags=["numbers"]
tables = [(RUNS / run / "pretrain/metrics.csv").read_text() for run in ("whole", "stopped")]
{
    "metrics.csv is the same": tables[0] == tables[1],
    "weights are the same": digest(whole) == digest(resumed),
}

# %% [markdown]
# # 8. Cut the model
#
# ## Within a layer: tensor parallelism
#
# A pair of layers can be cut along the 64 numbers between them. The first, *column parallel*, is
# cut by its outputs; the second, *row parallel*, by its inputs. Each rank computes its half of the
# 64 alone, and a single sum over the ranks, after the pair, makes *z* whole. ReLU works number by
# number and may stand between; a softmax over the 64 could not. That is why `ExampleModelTrunk`
# has Megatron's layers in place of `nn.Linear`. By hand:

# %% tags=["numbers"]
first, second, images = autoencoder.linear1, autoencoder.linear2, batch["data"]
with torch.no_grad():
    shares = []
    for half in (slice(0, 32), slice(32, 64)):  # of rank 0 and of rank 1
        hidden = torch.relu(images.flatten(1) @ first.weight[half].T + first.bias[half])
        shares.append(hidden @ second.weight[:, half].T)
    z_of_two = sum(shares) + second.bias  # the all-reduce
    z_of_one = autoencoder(images)["z"]
difference = float((z_of_two - z_of_one).abs().max())
print(f"largest difference of z: {difference:.1e}")
{"halves make the whole": difference < 1e-4}

# %% [markdown]
# ## Between layers: pipeline parallelism
#
# The first stage holds the encoder, the second the decoder, and *z* travels between them.
# Megatron's schedule does not know the model, so the model has to tell it three things:
# `model_type` (what kind of stages there are), `pre_process` and `post_process` (which of them
# this is), and `set_input_tensor`, by which the schedule hands a stage what the one before has
# computed. Here we are the schedule:

# %% tags=["numbers"]
encoder = PretrainConfig(initial_ckpt_path=str(checkpoint)).configure_model()
decoder = PretrainConfig(initial_ckpt_path=str(checkpoint)).configure_model()
encoder.post_process = decoder.pre_process = False  # what Megatron tells stages 0 and 1
with torch.no_grad():
    sent = encoder(batch["data"])  # (sequence, batch, hidden), as stages exchange tensors
    decoder.set_input_tensor([sent])
    of_stages = decoder(batch["data"])["x_hat"]
    of_one = autoencoder(batch["data"])["x_hat"]
print("sent from stage 0 to stage 1:", tuple(sent.shape))
{"outputs that differ": int((of_stages != of_one).sum())}

# %% [markdown]
# ## The same run under two processes
#
# Now for real: the script of section 1, started twice, on one process and with
# `--devices 2 --tensor-parallel 2`. Both make the run of section 7 again, with the same seed and
# the same 100 steps. The two processes hold half of each layer and talk to each other at every
# step. Only runs on the same kind of device compare: without two GPUs, both runs use the CPU.

# %%
import subprocess


def run_script(name: str, processes: int) -> Path:
    """Pretrains by the script, each layer cut over the processes; returns the last checkpoint."""
    chosen = replace(short, output_dir=RUNS / name, devices=processes, tensor_parallel=processes)
    if torch.cuda.device_count() < 2:
        chosen = replace(chosen, accelerator="cpu")
    command = [sys.executable, str(ROOT / PRETRAIN.script)]
    for option in fields(chosen):
        if (value := getattr(chosen, option.name)) != option.default:
            command += ["--" + option.name.replace("_", "-"), str(value)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


one, two = run_script("one", 1), run_script("two", 2)

# %% tags=["numbers"]
of_one, of_two = metrics("one/pretrain"), metrics("two/pretrain")
print("step   1 process    2 processes")
for a, b in zip(of_one, of_two, strict=True):
    if a["step"] in (1, 10, 50, 100):
        print(f"{a['step']:>4.0f}   {a['train_loss']:.8f}   {b['train_loss']:.8f}")
difference = np.abs(of_one["train_loss"] - of_two["train_loss"]).max()
print(f"largest difference: {difference:.1e}")
{
    "train_loss of 1 process": round(float(of_one["train_loss"][-1]), 5),
    "train_loss of 2 processes": round(float(of_two["train_loss"][-1]), 5),
}

# %% [markdown]
# And here is what they wrote. Each tensor lies in pieces, two of those that were cut, and still
# one process reads them as a whole:

# %% tags=["numbers"]
from torch.distributed.checkpoint.filesystem import FileSystemReader

saved: Any = FileSystemReader(two / "weights").read_metadata().state_dict_metadata
for name in ("linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"):
    pieces = [tuple(chunk.sizes) for chunk in saved[f"module.{name}"].chunks]
    print(f"{name:<15} {tuple(saved[f'module.{name}'].size)!s:<10} in pieces {pieces}")

ours, theirs = weights(one), weights(two)
difference = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
print(f"largest difference of a weight: {difference:.1e}")
{"weights are the same but for rounding": difference < 1e-4}

# %% [markdown]
# # Where next
#
# - `./run tutorial` runs the three scripts at their full length, `./run tensorboard` shows their
#   curves.
# - Change a demand and see what breaks: leave out the `loss_mask`, have `reduce` return the last
#   micro batch, put a `nn.Linear` in place of one of Megatron's layers and start two processes.
# - `docs/parallelism.md` draws the cuts. Run section 8 again with `pipeline_parallel=2` in place of
#   `tensor_parallel=2`, or with neither: then each process takes half of each batch.
# - `docs/datasets.md` is for a dataset of your own: `python -m megakit.testing` checks it.
# - `model_components.py` is the file to copy and change for a model of your own.
