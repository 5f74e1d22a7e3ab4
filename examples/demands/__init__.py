"""Shows what NeMo and Megatron demand, one experiment a file; see docs/concepts.md."""
