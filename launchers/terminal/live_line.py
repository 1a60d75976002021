"""Lines on standard output, with a live one below them on a terminal."""

import shutil
import sys

_CLEAR_LINE = "\r\033[K"


class LiveLine:
    """Prints lines that stay, and draws a line that the next one replaces.

    Attributes:
        is_drawn: bool, whether standard output is a terminal. A live line is
            drawn there alone: elsewhere it would fill a log.
    """

    def __init__(self):
        self.is_drawn = sys.stdout.isatty()

    def print(self, text):
        """Prints a line that stays, in place of the live one."""
        print(f"{_CLEAR_LINE * self.is_drawn}{text}", flush=True)

    def draw(self, text):
        """Draws the live line, cut to the width of the terminal."""
        if self.is_drawn:
            width = shutil.get_terminal_size().columns - 1
            print(f"{_CLEAR_LINE}{text[:width]}", end="", flush=True)
