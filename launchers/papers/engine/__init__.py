"""What runs trials of experiments and lays out what they came to."""
