"""Clipping, and noise on a public grid: what every private optimizer is made of."""
