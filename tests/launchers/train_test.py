import json
import re

import pytest

from tests.launchers.programs import run_here, run_program


@pytest.mark.slow
def test_trains_in_quiet_and_ends_with_what_it_reached(tmp_path):
    workdir = tmp_path / "run"
    done = run_program(
        "train",
        "--config=configs/digits_dpsgd.py",
        "--config.noise_multiplier=1.1",
        "--config.epochs=1",
        f"--workdir={workdir}",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((workdir / "result.json").read_text("utf-8"))
    assert result["noise_multiplier"] == 1.1
    last = done.stdout.splitlines()[-1]
    match = re.fullmatch(
        r"test accuracy (0\.\d\d) at \(ε = (\d+\.\d\d), δ = 1e-05\), "
        "Poisson sampling, PLD",
        last,
    )
    assert match, last
    assert float(match[1]) == round(result["test_accuracy"], 2)
    assert result["epsilon"] <= float(match[2]) < result["epsilon"] + 0.01
    assert re.search(r"^devices +(CPU|GPU)", done.stdout, re.MULTILINE)
    # One line of the library, and nothing of TensorFlow.
    (line,) = done.stderr.splitlines()
    assert line.startswith("Per-example gradients of mlp: ")


def test_dry_run_says_what_it_would_do(tmp_path):
    workdir = tmp_path / "run"
    done = run_here(
        "train",
        "--config=configs/digits_dpsgd.py",
        f"--workdir={workdir}",
        "--dry_run",
    )
    assert done.returncode == 0, done.stderr
    announced = dict(
        line.split(maxsplit=1) for line in done.stdout.splitlines()
    )
    assert "warning" not in announced
    assert "noise multiplier 4.91," in announced["mechanism"]
    assert announced["privacy"].startswith("ε = 2 at δ = 1e-05 (PLD) after 30")
    assert re.fullmatch(
        r"about \d+ s: 180 steps of [\d.]+ s, without evaluation",
        announced["time"],
    )
    assert re.match(r"about \d+ MiB", announced["memory"])
    assert not workdir.exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--config=configs/digits_dpsgd.py", "--config.epoch=3"],
            "error: Expected a field of the config, got 'epoch'. "
            "Did you mean epochs or start_epoch?",
        ),
        (
            ["--config=configs/none.py"],
            "error: Expected the file of a config, got none: No such file "
            "or directory: 'configs/none.py'.",
        ),
        (
            ["--config=configs/digit_dpsgd.py"],
            "error: Expected the file of a config, got none: No such file "
            "or directory: 'configs/digit_dpsgd.py'. Did you mean "
            "configs/digits_dpsgd.py?",
        ),
        (
            # No other program, which may be loaded here, has such a flag.
            ["--config=configs/digits_dpsgd.py", "--inner_optimizer=SGD"],
            "error: Expected a flag of the program, got --inner_optimizer, a "
            "field of the config: --config.inner_optimizer.",
        ),
        (
            ["--config=configs/digits_dpsgd.py", "--config.delta=1.5"],
            "error: Expected 0 < delta < 1, got 1.5. It should lie well "
            "below 1 / (number of examples).",
        ),
    ],
    ids=["field", "file", "misspelt", "flag", "value"],
)
def test_mistakes_end_with_one_line(tmp_path, arguments, message):
    failed = run_here("train", *arguments, f"--workdir={tmp_path / 'run'}")
    assert failed.returncode == 2
    assert failed.stderr.splitlines() == [message]
    assert not (tmp_path / "run").exists()
