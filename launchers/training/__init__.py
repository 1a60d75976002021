"""What programs with a training config share: the run, its parts, its files."""
