"""Clipping and noise on a public grid, which all mechanisms are made of."""
