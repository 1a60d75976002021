"""Configs of training runs, one experiment a file."""
