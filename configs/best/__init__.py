"""Configs of the most accurate private training that is known, by data."""
