"""5. `set_input_tensor` for pipeline stages.

A later pipeline stage receives the output of the previous stage through `set_input_tensor`. Does a
training without pipeline stages need this method?

It does: Megatron's schedule calls `set_input_tensor` in every layout, on the first stage with None.

Try: in the last run, replace the line with `del` by
`ExampleModelTrunk.set_input_tensor = lambda *_: None`. Is this enough for one stage? And for two,
as in the first run?
"""

from experiments.training import train
from megakit.training import ExactStrategy
from model_components import ExampleModelTrunk


def with_two_stages() -> str:
    """Two pipeline stages."""
    # NeMo's own strategy does not know the width of z: see demand 10.
    return train(pipeline=2, strategy=ExactStrategy).loss


def with_one_stage() -> str:
    """One pipeline stage on each of two data-parallel ranks."""
    return train().loss


def without_method() -> str:
    """One pipeline stage, and a model without `set_input_tensor`."""
    del ExampleModelTrunk.set_input_tensor
    return train().loss
