"""Runs the trials of experiments; makes their tables and figures."""
