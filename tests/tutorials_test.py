"""The notebooks of docs/tutorials run, from the first cell to the last."""

import json
import pathlib
import runpy

import pytest

from tf_dpsub.accounting import selection

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(notebook, kind):
    """The texts of the cells of a kind."""
    held = json.loads(notebook.read_text("utf-8"))
    return [
        "".join(cell["source"])
        for cell in held["cells"]
        if cell["cell_type"] == kind
    ]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs(notebook, tmp_path, monkeypatch):
    """In this process, whose entropy is the same in each run."""
    program = tmp_path / f"{notebook.stem}.py"
    program.write_text("\n\n".join(cells(notebook, "code")), "utf-8")
    monkeypatch.chdir(tmp_path)
    # A search of 30 expected trials may have hundreds.
    monkeypatch.setattr(selection, "draw_trials", lambda *_: 2)
    runpy.run_path(str(program))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_is_written_like_the_rest(notebook):
    held = json.loads(notebook.read_text("utf-8"))
    assert held["nbformat"] == 4
    assert held["cells"][0]["source"][0].startswith("# ")
    for cell in held["cells"]:
        # What a run says belongs to that run.
        assert cell["cell_type"] == "markdown" or not cell["outputs"]
        assert not any(line.startswith("%") for line in cell["source"])
    text = "\n".join(cells(notebook, "code") + cells(notebook, "markdown"))
    assert max(map(len, text.splitlines())) <= 80


def test_are_all_listed():
    listed = (FOLDER / "index.md").read_text("utf-8")
    assert len(NOTEBOOKS) == 5
    for notebook in NOTEBOOKS:
        assert f"[{notebook.name}]({notebook.name})" in listed
