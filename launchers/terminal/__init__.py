"""Input and output of programs on a terminal."""
