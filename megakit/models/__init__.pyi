from ..nemo.config import (
    OVERRIDE_BIONEMO_CONFIG_DEFAULTS as OVERRIDE_BIONEMO_CONFIG_DEFAULTS,
    MegatronBioNeMoTrainableModelConfig as MegatronBioNeMoTrainableModelConfig,
    MegatronLossType as MegatronLossType,
)
from ..nemo.imported_weights import checkpoint_from_weights as checkpoint_from_weights
from ..nemo.inference import (
    load_for_inference as load_for_inference,
    returns_latent as returns_latent,
)
from ..nemo.recorded_settings import IOMixinWithGettersSetters as IOMixinWithGettersSetters
from .attention import ScaledDotProductAttention as ScaledDotProductAttention
from .layers import (
    column_parallel_linear as column_parallel_linear,
    row_parallel_linear as row_parallel_linear,
)
from .partial_loading import load_model_weights as load_model_weights
from .seeding import seeded as seeded
from .transformer import (
    SeededGPTModel as SeededGPTModel,
    transformer_block_spec as transformer_block_spec,
    transformer_layer_spec as transformer_layer_spec,
)
