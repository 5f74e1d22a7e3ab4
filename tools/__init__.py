"""Commands that say whether a training is right: `check`, `compare`, `trace`, `layout`."""
