"""Shows what NeMo and Megatron demand, one experiment per file; see docs/course."""
