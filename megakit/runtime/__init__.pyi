from .accelerator import Accelerator as Accelerator
from .accelerator import AcceleratorName as AcceleratorName
from .accelerator import find_accelerator as find_accelerator
from .accelerator import use_accelerator as use_accelerator
from .accelerator import use_megatron as use_megatron
