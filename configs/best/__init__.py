"""Configs of the most accurate recipe for each data set."""
