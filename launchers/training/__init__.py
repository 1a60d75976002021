"""Training runs: their configs, objects and files."""
