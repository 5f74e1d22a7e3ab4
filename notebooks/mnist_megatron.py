# %% [markdown]
# # What NeMo and Megatron require of a model
#
# This notebook trains the tutorial's autoencoder, turns its encoder into a digit classifier, and
# classifies the test images. NVIDIA NeMo 2 and Megatron-Core run every step, as they do for
# language models on thousands of GPUs. Each section states one requirement of these frameworks,
# shows the class that meets the requirement, and shows a result of your own run. The classes are
# imported from `model_components.py` and not copied. All cells together take one to two minutes on
# two CPU cores.

# %% [markdown]
# Run the cells from top to bottom. If you stop a cell that trains (■), run the cell again to resume
# the training. The next cell finds the tutorial's folder.

# %%
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# VS Code and Jupyter name this file; otherwise the folder counts in which Python was started.
place = globals().get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME", "")
folders = [*Path(place).parents, Path.cwd(), *Path.cwd().parents]
ROOT = next(folder for folder in folders if (folder / "model_components.py").is_file())
sys.path.insert(0, str(ROOT))

RUNS = Path(os.environ.get("NOTEBOOK_RUNS") or tempfile.mkdtemp())  # for checkpoints and metrics

# %% [markdown]
# NeMo and Megatron assume that the machine has an NVIDIA GPU. `import_stack` imports them. On a
# machine without a GPU, `import_stack` first replaces the functions that would fail there.
# `megakit/runtime` contains all replacements, each with its reason.

# %%
from megakit.job.interactive import import_stack, open_run
from mnist.sizes import SizeOptions

import_stack(width=SizeOptions.hidden_size)

import lightning.pytorch as pl
import matplotlib.pyplot as plt
import numpy as np
import torch

from megakit.models.loading import load_model_weights, num_parameters
from megakit.training import cosine_annealing, megatron_adam, train
from notebooks.display import show_figure, show_source

plt.rcParams |= {"figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}

# %% [markdown]
# The notebook looks for MNIST where the scripts look. The first choice is the folder in the
# variable `MNIST_DATA_DIR`, the next is the folder that your runs used, the last is `data`. If
# MNIST is in none of these folders, the next cell downloads MNIST. Without a network, the cell
# chooses `digits`, 1,797 scans that come with scikit-learn.

# %%
from mnist.data_dir import find_data_dir
from mnist.files import find_dataset

DATA_DIR = find_data_dir(ROOT / "runs", default=ROOT / "data", report=print)
DATASET = find_dataset(DATA_DIR, "auto", report=print)
print(f"This notebook trains and tests with the dataset {DATASET}.")

# %% [markdown]
# The terms of this notebook:
#
# - A *rank* is one process of the job, usually with one GPU.
# - *Tensor-parallel* ranks each hold a part of each layer; *pipeline-parallel* ranks each hold some
#   of the layers, called a *pipeline stage*.
# - *Data-parallel* ranks each hold a copy of the model and process different samples.
# - A *micro batch* is the set of samples in one forward pass of a rank.

# %% [markdown]
# # 1. Pretrain
#
# ## A sample depends only on its index
#
# In plain PyTorch, a `DataLoader` shuffles, and a random transform draws from a global generator.
# Megatron permits neither. All ranks of one copy of the model load each sample on their own, and
# Megatron does not check that they load the same sample. A resumed run also has to load the samples
# that the uninterrupted run would have loaded. So the dataset has to compute each sample, with the
# order and all random effects, from seed, epoch and index.

# %% [markdown]
# The autoencoder learns to restore images from which a fifth of the pixels was dropped.
# `DropPixels` computes the dropped pixels from seed, epoch and index:

# %%
from model_components import DropPixels

show_source(DropPixels)

# %%
from megakit.data import EpochIndex
from model_components import MNISTDataModule
from model_pretrain import PRETRAIN, PretrainOptions

MICRO_BATCH = 32  # samples per forward pass; the global batch of a step has 128 samples
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
print("Images at the places 0 to 7:", [int(data.mnist_train[i]["idx"]) for i in range(8)])


# %%
def draw_images(images: Iterable, titles: Iterable[str] = (), columns: int = 12) -> None:
    """Draws images (28, 28) in rows, with dark ink on white."""
    pictures = list(images)
    rows, size = -(-len(pictures) // columns), 9 / columns
    _, axes = plt.subplots(rows, columns, figsize=(9, rows * (size + 0.4 * bool(titles))))
    for ax, image in zip(axes.flat, pictures, strict=False):
        ax.imshow(image, cmap="gray_r", vmin=0, vmax=1)
    for ax, title in zip(axes.flat, titles, strict=False):
        ax.set_title(title, fontsize=9)
    for ax in axes.flat:
        ax.set_axis_off()


# %% tags=["numbers"]
epochs = data.mnist_train.dataset  # the training images, by (epoch, index)
views = [epochs[EpochIndex(epoch, 7)] for epoch in (0, 1, 2, 0)]
shown = [views[0]["data"][0], *(view["corrupted"][0] for view in views)]
titles = ["image 7", "epoch 0", "epoch 1", "epoch 2", "epoch 0 again"]
draw_images(shown, titles, columns=7)
others, again = int((shown[1] != shown[2]).sum()), int((shown[1] != shown[4]).sum())
show_figure(f"Image 7: {others} pixels differ between epochs 0 and 1, {again} in epoch 0 again.")
{"pixels that differ, epochs 0 and 1": others, "pixels that differ, epoch 0 twice": again}

# %% [markdown]
# ## A data sampler states two batch sizes
#
# Megatron reads the samples in the order of their indices, and divides the samples of each step
# over micro batches and data-parallel ranks. So a single batch size is not enough. NeMo's strategy
# requires a `data_sampler` of the data module, with a *micro* and a *global* batch size. The global
# batch contains the samples of one optimizer step, from all micro batches and all data-parallel
# ranks.

# %%
from megakit.data import MegatronDataModule

show_source(MegatronDataModule.__init__, MNISTDataModule.setup, MNISTDataModule.with_random_effects)

# %% tags=["numbers"]
sampler = data.data_sampler
print(type(sampler).__mro__[1].__module__, type(sampler).__mro__[1].__name__)
{
    "micro batch size": sampler.micro_batch_size,
    "global batch size": sampler.global_batch_size,
    "micro batches of a step on one rank": sampler.global_batch_size // sampler.micro_batch_size,
}

# %% [markdown]
# ## A config builds the model late
#
# A layer has to know its rank before it can allocate its part of the weights. The ranks exist only
# after NeMo's strategy has set up the process groups. So the Lightning module receives a config,
# and the strategy calls `configure_model` when the process groups exist. The config names the class
# of the model and the class of the loss. Until the call, the Lightning module has no parameters.

# %%
from model_components import BionemoLightningModule, ExampleGenericConfig, PretrainConfig

show_source(ExampleGenericConfig, PretrainConfig, BionemoLightningModule.configure_model)


# %% tags=["numbers"]
def build_module(options: PretrainOptions) -> BionemoLightningModule:
    """Returns the autoencoder's Lightning module, with optimizer and learning-rate schedule."""
    return BionemoLightningModule(
        config=PretrainConfig(seed=options.seed),
        optimizer=megatron_adam(options.lr, cosine_annealing(options.max_steps)),
    )


{"parameters before training": num_parameters(build_module(options))}

# %% [markdown]
# ## Megatron's schedule calls `training_step`
#
# In plain PyTorch, your loop calls `loss.backward()`. Here, a loop calls NeMo's
# `MegatronStrategy`, and the strategy calls Megatron's schedule. The schedule runs forward and
# backward over all micro batches, in the order that the pipeline requires. It calls `training_step`
# once per micro batch. `training_step` returns the model's *output*; on the last pipeline stage, a
# loss object computes the loss from this output.

# %%
show_source(
    BionemoLightningModule.forward,
    BionemoLightningModule.training_step,
    BionemoLightningModule.training_loss_reduction,
)

# %% [markdown]
# The trainer is NeMo's `nl.Trainer`. `build_trainer` sets the parallel sizes, the precision, the
# logger and the callbacks.

# %%
from model_components import build_trainer

show_source(build_trainer)


# %% [markdown]
# The next callback records the calls of the first steps. A hook of torch tells it when the model
# computes a micro batch.

# %%
class Recorder(pl.Callback):
    """Records the calls of the training, one line for each call."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.register_forward_hook(self.on_forward)

    def on_train_batch_start(self, *args: object) -> None:
        self.seen.append("the loop calls the strategy, and the strategy calls the schedule")

    def on_forward(self, module: torch.nn.Module, inputs: tuple, output: dict) -> None:
        shapes = {name: tuple(value.shape) for name, value in output.items()}
        self.seen.append(f"  training_step of a micro batch {tuple(inputs[0]['data'].shape)}")
        self.seen.append(f"    returns {shapes}")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: object
    ) -> None:
        self.seen.append(f"  the loss reduces the reports to {float(outputs['loss']):.5f}")


# %%
module, recorder = build_module(options), Recorder()
with open_run(PRETRAIN, options) as run:  # checks the options, locks the folder of the run
    trainer = build_trainer(run)  # a nemo.lightning.Trainer with the strategy of megakit
    trainer.callbacks.append(recorder)
    train(model=module, data=data, trainer=trainer, resume=run.resume)

print("strategy:", " < ".join(kind.__name__ for kind in type(trainer.strategy).__mro__[:2]))
print(*recorder.seen[:10], sep="\n")


# %% [markdown]
# Four micro batches of 32 samples are one global batch of 128 samples, and one step of the
# optimizer. The next figure shows all 600 steps.

# %%
def metrics(run: str) -> np.ndarray:
    """Returns the rows of a run's metrics.csv by column name; NaN where nothing was measured."""
    return np.genfromtxt(RUNS / run / "metrics.csv", delimiter=",", names=True)


def draw_curves(run: str, quantity: str) -> None:
    """Shows training and validation loss; values above 4 times the last are cut off."""
    rows = metrics(run)
    _, ax = plt.subplots(figsize=(7, 2.6))
    for name, style in (("train_loss", "-"), ("val_loss", "o--")):
        known = rows[~np.isnan(rows[name])]
        ax.plot(known["step"], known[name], style, label=name)
    losses = rows["val_loss"][~np.isnan(rows["val_loss"])]
    ax.set(xlabel="optimizer step", ylabel=quantity, ylim=(0, 4 * losses[-1]))
    ax.legend(frameon=False)
    show_figure(f"The validation's {quantity} goes from {losses[0]:.4f} to {losses[-1]:.4f}.")


# %% tags=["numbers"]
draw_curves("pretrain", "mean squared error")
{
    "parameters after training": num_parameters(module),
    "val_loss": round(float(metrics("pretrain")["val_loss"][-1]), 4),
}

# %% [markdown]
# ## A loss is an object with `forward` and `reduce`
#
# A step consists of several micro batches on several ranks. `forward` returns two values for one
# micro batch: the loss that Megatron backpropagates, and a report for the log. `reduce` computes
# one value from the reports of all micro batches and all data-parallel ranks. This value must not
# depend on how the samples are divided into micro batches.

# %%
from megakit.training import MeanLossReduction
from model_components import MSELossReduction

show_source(MSELossReduction, MeanLossReduction.reduce)

# %% tags=["numbers"]
from megakit.data import fetch_batch

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
# `torch.save` writes the tensors of one process. A distributed checkpoint (`weights/`) stores the
# name and the full shape of each tensor, and which file contains which part. So any layout of ranks
# can load it. NeMo adds the *context*: the settings of the config, such as the sizes of the model.
# `megakit` adds `manifest.json`, which marks the checkpoint as complete and stores its validation
# loss.

# %%
from megakit.models import MegatronBioNeMoTrainableModelConfig

show_source(MegatronBioNeMoTrainableModelConfig.load_settings_from_checkpoint)

# %%
from megakit.checkpoints import read_manifest, read_model_settings

for file in sorted(checkpoint.rglob("*")):
    if file.is_file():
        print(f"{file.stat().st_size:>9,}  {file.relative_to(checkpoint.parent)}")

settings, manifest = read_model_settings(checkpoint), read_manifest(checkpoint)
print("\ncontext: ", {name: settings[name] for name in ("hidden_size", "latent_size")})
print("manifest:", {name: getattr(manifest, name) for name in ("model", "step", "val_loss")})

# %% [markdown]
# ## A gradient is in `main_grad`
#
# Megatron's `DistributedDataParallel` adds the gradients of all micro batches to one buffer. One
# all-reduce over the data-parallel ranks then synchronizes the whole buffer. So `weight.grad` is
# None, and `weight.main_grad` is the gradient. Only an optimizer of Megatron reads this buffer, so
# the module gets the optimizer from `megatron_adam`.

# %%
show_source(megatron_adam)

# %% tags=["numbers"]
parameters: Any = dict(module.named_parameters())
name = next(name for name in parameters if name.endswith("linear1.weight"))
buffer = parameters[name].main_grad
print(f"{name}: grad {parameters[name].grad}, main_grad {tuple(buffer.shape)} {buffer.dtype}")
{"weights with grad": sum(weight.grad is not None for weight in parameters.values())}

# %% [markdown]
# # 2. Reconstructions
#
# The autoencoder reconstructs 784 pixels from 3 numbers. These numbers determine the rough shape,
# but not always the right digit. In the figure, the upper row shows the input, without a fifth of
# its pixels. The lower row shows the reconstruction.

# %%
from model_components import PretrainModel

show_source(PretrainModel)

# %%
samples = torch.stack([epochs[EpochIndex(9, i)]["corrupted"] for i in range(12)])
originals = torch.stack([epochs[EpochIndex(9, i)]["data"] for i in range(12)])
with torch.no_grad():
    restored = autoencoder(samples)["x_hat"].reshape(-1, 28, 28)
draw_images([*samples[:, 0], *restored])
error = float(((restored - originals[:, 0]) ** 2).mean())
show_figure(f"Twelve corrupted digits and their reconstructions; mean squared error {error:.3f}.")

# %% [markdown]
# # 3. Fine-tune
#
# The classifier has the same trunk as the autoencoder and another head. The config names the
# weights that the checkpoint need not contain: those whose names begin with `digit_classifier`.
# Any other weight of the classifier that the checkpoint lacks is an error. Otherwise, a renamed
# layer would keep its random initial weights without any message. The decoder's weights are not
# used.

# %%
from model_components import ExampleFineTuneConfig, ExampleFineTuneModel

show_source(ExampleFineTuneModel, ExampleFineTuneConfig)

# %% tags=["numbers"]
fresh = ExampleFineTuneConfig().configure_model()
left = load_model_weights(fresh, checkpoint, skip={"digit_classifier"})
print("not loaded:", ", ".join(left))
trunk, theirs = dict(fresh.named_parameters()), dict(autoencoder.named_parameters())
{
    "weights of the trunk": sum(name in theirs for name in trunk),
    "loaded from the checkpoint": sum(
        torch.equal(trunk[name], theirs[name]) for name in trunk if name in theirs
    ),
}

# %% [markdown]
# The next cell calls the function of the script, as `./run finetune` does. The function passes the
# checkpoint's path and the prefix to `ExampleFineTuneConfig`, and trains. The Lightning module is
# the same class as before, because the config names the model and the loss.

# %%
from model_components import ClassifierLossReduction
from model_finetune import FINETUNE, FinetuneOptions, finetune

show_source(finetune, ClassifierLossReduction)

# %% tags=["numbers"]
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
{"val_loss": round(float(metrics("finetune")["val_loss"][-1]), 4)}

# %% [markdown]
# # 4. Predict
#
# Prediction also uses the strategy, because the model may be sharded. The schedule requires batches
# of equal size, so the last batch is padded, and `loss_mask` is 0 for the padding. Several ranks
# process different images, so `predict_step` returns the index of each image with its output. At
# the end, `predict` checks that each image is there exactly once.

# %%
show_source(BionemoLightningModule.predict_step)

# %% tags=["numbers"]
from model_predict import PREDICT, PredictOptions, predict

predict_options = PredictOptions(data_dir=DATA_DIR, dataset=DATASET, output_dir=RUNS)
with open_run(PREDICT, predict_options) as run:
    table = np.loadtxt(predict(run), delimiter=",", skiprows=1)
idx, label, prediction = table[:, :3].astype(int).T
probabilities = table[:, 3:]
{
    "rows": len(idx),
    "different images": len(set(idx)),
    "accuracy": round(float((label == prediction).mean()), 4),
}

# %% [markdown]
# # 5. Mistakes
#
# Megatron's schedule computes losses and no metrics. The config lists metrics, and `megakit`
# computes them in each validation. The confusion matrix has one row for each label and one column
# for each prediction. The colors show mistakes only.

# %%
from model_components import accuracy_of_classes

show_source(ExampleFineTuneConfig.validation_metrics, accuracy_of_classes)

# %%
counts = np.zeros((10, 10), int)
np.add.at(counts, (label, prediction), 1)
wrong = counts - np.diag(counts.diagonal())
_, ax = plt.subplots(figsize=(4.6, 4.6))
ax.imshow(wrong, cmap="Oranges")
for (row, column), count in np.ndenumerate(counts):
    color = "white" if wrong[row, column] > 0.6 * wrong.max() else "black"
    ax.text(column, row, count or "", ha="center", va="center", fontsize=8, color=color)
ax.set(xlabel="prediction", ylabel="label", xticks=range(10), yticks=range(10))
ax.tick_params(length=0)
ax.spines[:].set_visible(False)
row, column = np.unravel_index(wrong.argmax(), wrong.shape)
show_figure(
    f"Confusion matrix: {wrong.sum()} mistakes in {len(idx):,} images. The largest number of "
    f"mistakes, {wrong[row, column]}, is for label {row} and prediction {column}."
)

# %% [markdown]
# The next figure shows the mistakes with the highest probabilities. The title of each image is
# label → prediction and the probability of the prediction.

# %%
data.setup("predict")
confidence = probabilities.max(axis=1)
worst = [i for i in np.argsort(-confidence) if label[i] != prediction[i]][:20]
titles = [f"{label[i]} → {prediction[i]}\n{confidence[i]:.1%}" for i in worst]
draw_images([data.mnist_test[idx[i]]["data"][0] for i in worst], titles, columns=10)
show_figure(
    f"{len(worst)} wrong predictions with probabilities from {confidence[worst].min():.1%} to "
    f"{confidence[worst].max():.1%}."
)

# %% [markdown]
# The trunk maps each image to a point *z* in 3-D space, and the head classifies by position. The
# left plot shows *z* of the test images after pretraining, the right plot after fine-tuning.
# Pretraining places images of similar shape together. Fine-tuning places images of equal label
# together.

# %%
from model_components import ExampleModelTrunk

show_source(ExampleModelTrunk.forward)


# %%
def encode(model: ExampleModelTrunk, images: torch.Tensor) -> np.ndarray:
    """Returns z (B, 3) of images (B, 1, 28, 28)."""
    with torch.no_grad():
        return ExampleModelTrunk.forward(model, images).numpy()


def share_near_own(z: np.ndarray, labels: np.ndarray) -> float:
    """Returns the share of points that are closest to the mean point of their own label."""
    means = np.stack([z[labels == digit].mean(axis=0) for digit in range(10)])
    nearest = np.linalg.norm(z[:, None] - means, axis=2).argmin(axis=1)
    return float((nearest == labels).mean())


# %%
classifier = ExampleFineTuneConfig(initial_ckpt_path=str(classifier_checkpoint)).configure_model()
batch = fetch_batch(data.mnist_test, np.arange(300 if DATASET == "digits" else 2000))
labels, shares = batch["label"].numpy(), []
fig = plt.figure(figsize=(9.5, 4.5), layout="tight")
for side, model in enumerate((autoencoder, classifier), start=1):
    z = encode(model, batch["data"])
    ax = fig.add_subplot(1, 2, side, projection="3d")
    ax.scatter(*z.T, c=labels, cmap="tab10", s=3, alpha=0.6)
    for digit in range(10):
        ax.text(*np.median(z[labels == digit], axis=0), str(digit), weight="bold", size=12)
    ax.set(title=type(model).__name__, xticklabels=[], yticklabels=[], zticklabels=[])
    shares.append(share_near_own(z, labels))
show_figure(
    "Points in the latent space, by digit. The mean point of its own label is the closest for "
    f"{shares[0]:.0%} of the images after pretraining, for {shares[1]:.0%} after fine-tuning."
)


# %% [markdown]
# # 6. A dataset that breaks the contract
#
# Section 1 states the contract: a sample depends only on its index. Megatron reports no error if a
# dataset breaks the contract. Two ranks of one copy of the model then train on different samples.
# The dataset below draws its noise from torch's global generator, as many programs do.

# %%
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
    torch.manual_seed(rank)  # stands for the different random numbers that each rank used before
    views.append(Noisy(data.mnist_test)[0]["data"][0])
difference = (views[0] - views[1]).abs()
draw_images([*views, difference], ["rank 0", "rank 1", "difference"], columns=6)
show_figure(
    f"The same index on two ranks: {int((difference > 0).sum())} of 784 pixels differ, by "
    f"{float(difference.mean()):.2f} on average."
)

# %% [markdown]
# `assert_dataset_compatible_with_megatron` detects this error in milliseconds and prints a remedy.
# A seed for the global generator is no remedy, because Megatron uses the same generator. A
# generator of the dataset itself is no remedy if it continues from sample to sample.

# %%
import textwrap

from megakit.testing import assert_dataset_compatible_with_megatron


class Seeded(Noisy):
    """Seeds the global generator for each sample, which changes Megatron's random numbers."""

    def __getitem__(self, index: int) -> dict:
        torch.manual_seed(index)
        return super().__getitem__(index)


class OwnGenerator(Noisy):
    """Uses its own generator, which continues from one sample to the next."""

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
# The remedy is a generator for each sample, with a seed from (seed, epoch, index). A dataset with
# such a generator passes the check.

# %%
from megakit.data import sample_generator


class Repeatable(Noisy):
    """Uses a generator that is created for this sample."""

    def __getitem__(self, index: int) -> dict:
        sample, rng = self.dataset[index], sample_generator(42, 0, index)
        noise = torch.from_numpy(rng.random((1, 28, 28), dtype=np.float32))
        return {**sample, "data": sample["data"] + 0.3 * noise}


show_source(sample_generator)
assert_dataset_compatible_with_megatron(Repeatable(data.mnist_test))
assert_dataset_compatible_with_megatron(epochs)  # the dataset of the training above
print("Both datasets pass the check.")

# %% [markdown]
# # 7. Stop and resume
#
# A time limit, maintenance or a user stops long runs. Exact resumption requires a dataset that
# computes sample *n* without the samples before it, and a sampler that stores the number of
# consumed samples. It also requires a checkpoint with the states of optimizer and schedule. The
# next cells run 100 steps without a stop, and the same run with a Ctrl-C after step 50.

# %%
show_source(MegatronDataModule.resample, MegatronDataModule.state_dict)

# %%
import hashlib
import signal
from dataclasses import fields, replace

from megakit.errors import Stopped

short = replace(options, max_steps=100, precision="32", val_interval=50, save_interval=100)


class StopAt(pl.Callback):
    """Sends the signal of Ctrl-C after a given step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        if trainer.global_step == self.step:
            signal.raise_signal(signal.SIGINT)


# %%
def run_to(name: str, stop_at: int | None = None) -> Path:
    """Pretrains for 100 steps, or resumes this run; returns the last checkpoint."""
    with open_run(PRETRAIN, replace(short, output_dir=RUNS / name)) as run:
        trainer = build_trainer(run)
        trainer.callbacks.append(StopAt(stop_at))
        train(model=build_module(short), data=data, trainer=trainer, resume=run.resume)
    return Path(trainer.checkpoint_callback.last_model_path)


whole = run_to("whole")
try:
    run_to("stopped", stop_at=50)
except Stopped as stop:
    print(f"Stopped: {stop}")
resumed = run_to("stopped")


# %%
def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns all weights of a checkpoint of pretraining, loaded into a new model."""
    model = PretrainConfig(initial_ckpt_path=str(checkpoint)).configure_model()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def digest(checkpoint: Path) -> str:
    """Returns a hash of the bits of all weights."""
    bits = b"".join(weight.numpy().tobytes() for weight in weights(checkpoint).values())
    return hashlib.sha256(bits).hexdigest()[:32]


print(digest(whole), "not stopped")
print(digest(resumed), "stopped after step 50, and resumed")

# %% tags=["numbers"]
tables = [(RUNS / run / "pretrain/metrics.csv").read_text() for run in ("whole", "stopped")]
{
    "metrics.csv is the same": tables[0] == tables[1],
    "weights are the same": digest(whole) == digest(resumed),
}

# %% [markdown]
# # 8. Shard the model
#
# ## Tensor parallel: parts of each layer
#
# Two consecutive linear layers are sharded along the 64 features between them. The first layer is
# *column parallel*: each rank computes 32 of its outputs. The second layer is *row parallel*: each
# rank uses its 32 inputs, and one all-reduce sums the results of the ranks. ReLU acts on each
# feature separately, so ReLU needs no communication; a softmax over the 64 features would need it.
# So `ExampleModelTrunk` uses Megatron's parallel layers instead of `nn.Linear`.

# %%
show_source(ExampleModelTrunk.__init__)

# %% tags=["numbers"]
first, second, images = autoencoder.linear1, autoencoder.linear2, batch["data"]
with torch.no_grad():
    parts = []
    for half in (slice(0, 32), slice(32, 64)):  # the features of rank 0 and of rank 1
        hidden = torch.relu(images.flatten(1) @ first.weight[half].T + first.bias[half])
        parts.append(hidden @ second.weight[:, half].T)
    z_of_two = sum(parts) + second.bias  # the all-reduce
    z_of_one = autoencoder(images)["z"]
difference = float((z_of_two - z_of_one).abs().max())
print(f"largest difference of z: {difference:.1e}")
{"two halves give the z of one process": difference < 1e-4}

# %% [markdown]
# A layer that is not sharded is replicated: each tensor-parallel rank holds all of its weights. The
# replicas must begin with equal weights, because Megatron does not make them equal. So
# `ExampleFineTuneModel` in section 3 creates its head inside `seeded`, with a seed from the name of
# the head.

# %%
from megakit.models import seeded

show_source(seeded)

# %% [markdown]
# ## Pipeline parallel: some of the layers
#
# The first stage holds the encoder, the second stage holds the decoder. The first stage sends *z*
# to the second stage. Megatron's schedule does not know the model, so a model needs `model_type`
# and `set_input_tensor`. The schedule passes the output of the previous stage to
# `set_input_tensor`. By `pre_process` and `post_process`, a model knows whether it is the first or
# the last stage.

# %%
show_source(ExampleModelTrunk.set_input_tensor, ExampleModelTrunk.to_next_stage)

# %% tags=["numbers"]
encoder = PretrainConfig(initial_ckpt_path=str(checkpoint)).configure_model()
decoder = PretrainConfig(initial_ckpt_path=str(checkpoint)).configure_model()
encoder.post_process = decoder.pre_process = False  # as on stage 0 and on stage 1
with torch.no_grad():  # this cell does the work of the schedule
    sent = encoder(batch["data"])  # (sequence, batch, hidden), the shape that stages exchange
    decoder.set_input_tensor([sent])
    of_stages = decoder(batch["data"])["x_hat"]
    of_one = autoencoder(batch["data"])["x_hat"]
print("sent from stage 0 to stage 1:", tuple(sent.shape))
{"outputs that differ": int((of_stages != of_one).sum())}

# %% [markdown]
# ## The same run on two processes
#
# The next cell starts `model_pretrain.py` twice: on one process, and on two processes with
# `--devices 2 --tensor-parallel 2`. Both runs repeat section 7, with the same seed and the same 100
# steps. Each of the two processes holds half of each layer, and the processes communicate in every
# step. Without two GPUs, both runs use the CPU, because runs on different devices are not
# comparable.

# %%
from megakit.models import column_parallel_linear

show_source(column_parallel_linear)

# %%
import subprocess


def run_script(name: str, processes: int) -> Path:
    """Pretrains with the script, each layer on all processes; returns the last checkpoint."""
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
# The next cell reads the checkpoint of the two processes. Each sharded tensor is stored in two
# parts. One process loads the full tensors.

# %% tags=["numbers"]
from torch.distributed.checkpoint.filesystem import FileSystemReader

saved: Any = FileSystemReader(two / "weights").read_metadata().state_dict_metadata
for name in ("linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"):
    parts = [tuple(chunk.sizes) for chunk in saved[f"module.{name}"].chunks]
    print(f"{name:<15} {tuple(saved[f'module.{name}'].size)!s:<10} in parts {parts}")

ours, theirs = weights(one), weights(two)
difference = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
print(f"largest difference of a weight: {difference:.1e}")
{"weights are equal up to rounding": difference < 1e-4}

# %% [markdown]
# # Next steps
#
# - [docs/concepts.md](../docs/concepts.md) explains each requirement, with the error or the wrong
#   number that you get without it.
# - `./run tutorial` runs the three scripts with their full number of steps. `./run tensorboard`
#   shows their curves.
# - Run section 8 with `pipeline_parallel=2` instead of `tensor_parallel=2`.
# - [docs/parallelism.md](../docs/parallelism.md) shows which rank holds which weights.

# %% [markdown]
# - Break a requirement, and read the error or the wrong number. For example, let `reduce` return
#   the report of the last micro batch only.
# - [docs/datasets.md](../docs/datasets.md) describes datasets of your own. The command
#   `python -m megakit.testing` checks them.
# - For a model of your own, copy and change `model_components.py`.
