"""What programs read and write on a terminal."""
