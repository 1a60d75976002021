"""Callbacks for private training."""
