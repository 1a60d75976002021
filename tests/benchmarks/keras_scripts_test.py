"""The table of scripts as users write them is true."""

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
    found = {title: (changed, engine) for title, changed, engine, *_ in rows}
    assert len(found) == len(rows)
    return {
        title: tuple(cell.strip() for cell in cells)
        for title, cells in found.items()
    }


def test_every_script_is_in_the_table_with_its_changed_lines():
    written = table()
    found = {}
    for name in program.NAMES:
        title, changed = program.described(name)
        found[title] = changed
    assert set(found) == set(written)
    for title, (changed, engine) in written.items():
        if engine == "refused":
            assert changed == ""
        else:
            assert int(changed) == found[title] <= 5
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
def test_the_engine_is_the_one_written(name):
    title, _ = program.described(name)
    keras.utils.clear_session()
    assert program.row(name, blocks=0).engine == table()[title][1]
