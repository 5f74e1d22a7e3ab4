from .accelerator import (
    Accelerator as Accelerator,
    AcceleratorName as AcceleratorName,
    find_accelerator as find_accelerator,
    use_accelerator as use_accelerator,
    use_megatron as use_megatron,
)
