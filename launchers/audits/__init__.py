"""The audit of one mechanism."""
