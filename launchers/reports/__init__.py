"""Pages and figures of results."""
