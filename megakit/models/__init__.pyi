from .config import OVERRIDE_BIONEMO_CONFIG_DEFAULTS as OVERRIDE_BIONEMO_CONFIG_DEFAULTS
from .config import MegatronBioNeMoTrainableModelConfig as MegatronBioNeMoTrainableModelConfig
from .config import MegatronLossType as MegatronLossType
from .layers import column_parallel_linear as column_parallel_linear
from .layers import row_parallel_linear as row_parallel_linear
from .layers import seeded as seeded
from .loading import load_model_weights as load_model_weights
from .settings import IOMixinWithGettersSetters as IOMixinWithGettersSetters
