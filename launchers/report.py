"""Writes `report.html`, a page that shows what a folder of results holds.

    tf-dpsub report --workdir=out/digits

Every program writes this page when it ends; this command writes it again from
the files in the folder. The page needs no network and no other file. The page
of a run compares it with the other runs in the parent folder.
"""

import pathlib

from tf_dpsub.launchers.reports import folder_page
from tf_dpsub.launchers.terminal import program
from tf_dpsub.launchers.terminal.program import WORKDIR


def main():
    """Writes the page of the folder that the flags name."""
    if WORKDIR.value is None:
        raise ValueError("Expected --workdir, got none.")
    print(folder_page.write(pathlib.Path(WORKDIR.value)))


def run():
    """Runs `tf-dpsub report`."""
    program.run(main)


if __name__ == "__main__":
    run()
