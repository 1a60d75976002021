"""The table of scripts agrees with this version."""

import pathlib
import re

import keras
import pytest

from benchmarks.keras_scripts import __main__ as program

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "benchmarks.md"
ROW = re.compile(r"^\| (\w[\w ]*: [^|]*) \|([^|]*)\|([^|]*)\|([^|]*)\|(.*)\|$")


def table():
    """Engine and changed lines of each script, by its title."""
    lines = PAGE.read_text("utf-8").splitlines()
    rows = [match.groups() for match in map(ROW.match, lines) if match]
    cells_by_title = {
        title: (changed, engine) for title, changed, engine, *_ in rows
    }
    assert len(cells_by_title) == len(rows)
    return {
        title: tuple(cell.strip() for cell in cells)
        for title, cells in cells_by_title.items()
    }


def test_every_script_is_in_the_table_with_its_changed_lines():
    written = table()
    changed_by_title = {}
    for name in program.NAMES:
        title, changed = program.described(name)
        changed_by_title[title] = changed
    assert set(changed_by_title) == set(written)
    for title, (changed, engine) in written.items():
        if engine == "refused":
            assert changed == ""
        else:
            assert int(changed) == changed_by_title[title] <= 5
    private = [engine for _, engine in written.values() if engine != "refused"]
    assert len(private) >= 25
    assert private.count("graph") >= 0.9 * len(private)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "deep_ctr",
        "metric_learning",
        "siamese_contrastive",
        "timeseries_convnet",
        "vae_compute_loss",
        "weather_lstm",
        "wide_and_deep",
    ],
)
def test_the_engine_is_that_of_the_table(name):
    title, _ = program.described(name)
    keras.utils.clear_session()
    assert program.row(name, blocks=0).engine == table()[title][1]
