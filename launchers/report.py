"""Writes `report.html`, a page that shows what a folder of results holds.

    tf-dpsub report --workdir=out/digits

Every program writes this page when it ends; this command writes it again, of
what is there. The page needs no network and no other file. That of a run is
compared with other runs in the folder around it.
"""

import pathlib

from tf_dpsub.launchers.reports import folder_page
from tf_dpsub.launchers.terminal import program
from tf_dpsub.launchers.terminal.program import WORKDIR


def main():
    """Writes the page that the flags name."""
    if WORKDIR.value is None:
        raise ValueError("Expected --workdir, got none.")
    print(folder_page.write(pathlib.Path(WORKDIR.value)))


def run():
    """Runs `tf-dpsub report`."""
    program.run(main)


if __name__ == "__main__":
    run()
