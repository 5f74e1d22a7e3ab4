"""Everything that needs NeMo or Lightning. The rest of megakit runs where neither is installed."""
