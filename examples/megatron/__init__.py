"""The tutorial's chain of three scripts on Megatron-Core alone, without NeMo and Lightning."""
