"""Runs the test files it is given: the main program of each py_test in BUILD.

Bazel runs a test as a program, which would define pytest's functions and call
none of them.
"""

import sys

import pytest

if __name__ == "__main__":
    # The runfiles, where pytest would keep its cache, are read-only.
    sys.exit(pytest.main(["--slow", "-p", "no:cacheprovider", *sys.argv[1:]]))
