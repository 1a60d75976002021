"""Programs that are run from a terminal."""
