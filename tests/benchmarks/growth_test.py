"""Growth of steps: measurements, their resumption, tables and figures."""

import functools
import json
import types

import pytest

import tf_dpsub
from benchmarks import growth


def run(k, size, private, ms, name="batch", parameters=10):
    point = (k, name, size, private)
    return {
        "point": point,
        "ms": ms,
        "peak_mib": 100.0 + size,
        "parameters": parameters,
    }


RUNS = [
    run(k, size, private, (2.0 if private else 1.0) * size * scale)
    for k, scale in enumerate((1.0, 1.5, 9.0))
    for size in (64, 128, 256)
    for private in (False, True)
]


def test_medians_over_rounds():
    rows = growth.summarized(RUNS)["batch"]
    assert [r["size"] for r in rows] == [64, 128, 256]
    assert [r["ms"] for r in rows] == [(3 * s, 1.5 * s) for s in (64, 128, 256)]
    assert rows[0]["peak_mib"] == (164, 164)


def test_slope():
    assert growth.slope([1, 2, 4], [3, 6, 12]) == pytest.approx(1)
    assert growth.slope([1, 10], [1, 100]) == pytest.approx(2)


def test_table_and_figure():
    runs = RUNS + [run(0, k, True, 5.0 + k, "k") for k in (10, 100)]
    summary = growth.summarized(runs)
    text = growth.markdown(summary)
    assert "Time grows as batch size^1.00." in text
    assert "| 64 | 10 | 192.0 | 96.0 | 2.00 | 164 | 164 |" in text
    assert "| 10 | 10 | 15.0 |  |  | 110 |  |" in text
    description = growth.figures.description(growth.draw(summary))
    assert "private from 192 at 64 to 768 at 256" in description
    assert "plain Keras from 96 at 64 to 384 at 256" in description


def test_slope_of_parameters_is_over_their_number():
    runs = [
        run(0, width, True, 3.0 * width**2, "parameters", width**2)
        for width in (10, 20, 40)
    ]
    text = growth.markdown(growth.summarized(runs))
    assert "Time grows as parameters^1.00." in text


def test_goes_on(tmp_path, monkeypatch):
    commands = []

    def answer(command, **kwargs):
        commands.append(command[3:])
        result = {"ms": 1.0, "peak_mib": 2.0, "parameters": 3}
        return types.SimpleNamespace(stdout=f"said\n{json.dumps(result)}\n")

    monkeypatch.setattr(growth.subprocess, "run", answer)
    first = growth.measure(tmp_path, ["batch", "k"], 1, 0.5)
    sizes = growth.AXES["batch"].sizes, growth.AXES["k"].sizes
    assert len(commands) == len(first) == 2 * len(sizes[0]) + len(sizes[1])
    assert commands[:2] == [
        ["--axis=batch", "--size=64", "--seconds=0.5"],
        ["--axis=batch", "--size=64", "--seconds=0.5", "--private"],
    ]
    commands.clear()
    again = growth.measure(tmp_path, ["batch", "k"], 2, 0.5)
    assert len(commands) == len(first)
    assert len(again) == 2 * len(first)
    assert growth.summarized(again).keys() == {"batch", "k"}


@pytest.fixture
def small_models(monkeypatch):
    """Dense layers in place of convolutions, which take long to compile."""
    for name, shape in (
        ("resnet20_gn", (32, 32, 3)),
        ("mnist_cnn", (28, 28, 1)),
    ):
        monkeypatch.setattr(
            tf_dpsub.models,
            name,
            functools.partial(tf_dpsub.models.mlp, shape, (8,), 10),
        )


@pytest.mark.slow
@pytest.mark.usefixtures("small_models")
@pytest.mark.parametrize(
    ("axis", "size", "private"),
    [
        ("batch", 4, False),
        ("batch", 4, True),
        ("parameters", 8, True),
        ("k", 2, True),
        ("m", 30, True),
    ],
)
def test_points_are_measured(axis, size, private):
    result = growth.point(axis, size, private, 0.0)
    assert result["ms"] > 0
    assert result["peak_mib"] > 100
    assert result["parameters"] > 1000
