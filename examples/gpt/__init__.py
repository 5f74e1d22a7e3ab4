"""A language model on Megatron's GPTModel, with its scripts."""
