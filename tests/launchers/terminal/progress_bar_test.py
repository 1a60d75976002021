"""The progress bar: epochs, spent budget and time left."""

import re

import keras
import numpy as np
import pytest

import tf_dpsub
from tf_dpsub import callbacks
from tf_dpsub.launchers.terminal import progress_bar

EPOCHS = 3


def trained(bar, epochs=EPOCHS, noise_multiplier=4.0):
    """Trains a model on 40 examples with a progress bar."""
    rng = np.random.default_rng(0)
    model = tf_dpsub.make_private(
        keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    )
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(0.1),
            l2_norm_clip=1.0,
            noise_multiplier=noise_multiplier,
            batch_size=10,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        rng.normal(size=(40, 3)).astype("float32"),
        rng.integers(0, 2, 40),
        epochs=epochs,
        verbose=0,
        callbacks=[callbacks.PrivacyBudget(float("inf"), 1e-5), bar],
    )
    return model


def test_a_line_for_each_epoch(capsys):
    model = trained(progress_bar.ProgressBar(1e-5, budget=9.0))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == EPOCHS
    for k, line in enumerate(lines, start=1):
        assert line.startswith(f"epoch {k}/{EPOCHS}: accuracy 0")
        assert "dropped" not in line
        assert (" left" in line) == (k < EPOCHS)
        assert " of 9" in line
    spent = float(re.search(r"ε at most ([\d.]+), of", lines[-1])[1])
    assert spent == pytest.approx(model.epsilon(1e-5, "rdp"), rel=1e-2)


def test_time_left_is_without_that_of_tracing(capsys, monkeypatch):
    """A second a look at the clock, an hour before the first step is done."""
    clock = iter([0.0, *range(3600, 7200)])
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: next(clock))
    trained(progress_bar.ProgressBar(1e-5))
    first, second, _ = capsys.readouterr().out.splitlines()
    # Four looks for three steps, of twelve; eight steps are left.
    assert first.endswith("; 11 s left")
    assert second.endswith("; 5 s left")


def test_without_noise_nothing_is_private(capsys):
    trained(progress_bar.ProgressBar(1e-5), 1, noise_multiplier=0.0)
    assert capsys.readouterr().out.endswith("; not private\n")


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(progress_bar, "_SECONDS_BETWEEN_DRAWINGS", 0.0)
    trained(progress_bar.ProgressBar(1e-5))
    drawn = re.split(r"\r\033\[K|\n", capsys.readouterr().out)
    shares = [
        int(re.search(r" (\d+) %", text)[1]) for text in drawn if "━" in text
    ]
    # Four steps in each of three epochs, and what stands between epochs.
    assert shares == sorted(shares)
    assert len(shares) == EPOCHS * 4 + EPOCHS - 1
    assert shares[0] == 8 and shares[-1] == 100
    assert all(len(text) < 80 for text in drawn if "━" in text)
