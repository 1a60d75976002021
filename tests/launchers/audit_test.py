"""The program that audits: what it finds, writes and refuses."""

import json

import keras
import pytest
import tensorflow as tf

from tests.auditing.audited_mechanisms import CHECKS, WithHalfTheNoise
from tests.launchers.programs import run_here
from tf_dpsub import accounting, data, optimizers
from tf_dpsub.launchers import audit
from tf_dpsub.launchers.audits import digits_membership, mechanism, samplers
from tf_dpsub.methods import METHODS

TINY = mechanism.Sizes(steps=200, cases=30, runs=200, canaries=40)


@pytest.mark.parametrize("name", METHODS)
def test_every_mechanism_has_its_budget(name):
    """That it keeps its claims is tested where mechanisms are audited."""
    make = mechanism.maker(
        name,
        mechanism.STEP_EPSILON,
        mechanism._random(11, 7),
        batch_size=16,
    )
    optimizer = make(keras.optimizers.SGD(1.0), 39)
    method = METHODS[name]
    assert type(optimizer).__name__ == method.optimizer
    config = optimizer.get_config()
    assert {key: config[key] for key in method.kwargs} == method.kwargs
    spent = accounting.epsilon(
        noise_multiplier=optimizer.effective_noise_multiplier,
        sampling_rate=1.0,
        steps=1,
        delta=mechanism.DELTA,
        accountant="pld",
    )
    assert 0.99 < spent <= 1.0


# `test_program` audits GEP and RGP; others are audited in `tests/auditing`.
def test_a_mechanism_keeps_its_claims():
    result = mechanism.audited("RGP-public", TINY, infers=False)
    if not result["passed"]:
        # Bounds hold with 99.9 %: one in a thousand is wrong, two are not.
        result = mechanism.audited("RGP-public", TINY, infers=False)
    assert [f["check"] for f in result["findings"]] == [
        *CHECKS,
        "sensitivity, mixed_float16",
        "one run",
        "one run, persons",
        "one run, rows of persons",
        "one run, rates",
    ]
    assert result["passed"], result["findings"]


def test_a_failure_is_named_first(tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers, "DPSGD", WithHalfTheNoise)
    # Single steps find it; one run fills its column.
    monkeypatch.setattr(mechanism, "_runs", lambda *_: [("one run", 1, {})])
    result = mechanism.audited("DP-SGD", TINY, infers=False)
    assert not result["passed"]
    audit.write([result], None, tmp_path, "the command")
    text = (tmp_path / "table.md").read_text("utf-8")
    assert "**DP-SGD**, variance: Of 39 numbers" in text
    assert "All claims hold" not in text
    # Columns of attacks that were not made.
    assert "loss threshold" not in text


def test_the_sampler_of_epochs_is_audited(tmp_path, monkeypatch):
    def order(self, index, replicas, keys):
        size = -(-self.examples // self.steps_per_epoch)
        draws = tf.data.Dataset.range(self.examples).batch(size).enumerate()
        return tf.data.Dataset.zip(draws.repeat(), keys).map(
            lambda numbered, key: (numbered[1], key, numbered[0])
        )

    with monkeypatch.context() as broken:
        broken.setattr(data.OncePerEpoch, "_draws", order)
        result = samplers.audited()
    assert not result["passed"]
    audit.write([_passed()], None, tmp_path, "the command", result)
    text = (tmp_path / "table.md").read_text("utf-8")
    assert "**once_per_epoch**, epsilon of epochs: In 3,000 runs" in text
    assert "All claims hold" not in text
    written = json.loads((tmp_path / "audit.json").read_text("utf-8"))
    assert written["samplers"] == [result]


def _passed():
    """The result of an audit that found nothing."""
    findings = [
        {"check": check, "passed": True, "value": 0.5, "detail": ""}
        for check in (*CHECKS, "one run")
    ]
    return {"mechanism": "DP-SGD", "findings": findings, "passed": True}


def test_votes_are_audited(tmp_path):
    assert mechanism.PATE in mechanism.NAMES
    result = mechanism.audited(mechanism.PATE, TINY)
    if not result["passed"]:
        result = mechanism.audited(mechanism.PATE, TINY)
    assert result["passed"], result["findings"]
    assert [f["check"] for f in result["findings"]] == [
        "variance",
        "independence",
        "sensitivity",
        "ledger",
        "epsilon",
    ]
    audit.write([result], None, tmp_path, "the command")
    text = (tmp_path / "table.md").read_text("utf-8")
    (row,) = (line for line in text.splitlines() if "| PATE |" in line)
    assert row.endswith("|  |  |") and row.count("|") == 7


@pytest.mark.slow
def test_dry_run_says_how_much_would_be_done(tmp_path):
    workdir = tmp_path / "audit"
    done = run_here(
        "audit", "--dry_run", "--mechanisms=GEP,RGP", f"--workdir={workdir}"
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["mechanisms"] == "GEP, RGP"
    assert "1,000 steps" in lines["each"] and "300 pairs" in lines["each"]
    assert lines["membership"].startswith("3 models on digits")
    assert not workdir.exists()


@pytest.mark.slow
def test_membership_shows_where_there_is_no_privacy(monkeypatch):
    # Enough epochs to memorise examples.
    monkeypatch.setattr(digits_membership, "EPOCHS", 50)
    plain, private = mechanism.attacked(), mechanism.attacked("DP-SGD")
    for attack in ("loss_threshold", "classifier"):
        exposed, hidden = getattr(plain, attack), getattr(private, attack)
        assert exposed.interval[0] > 0.65
        # e^8 allows as much; what is seen is far less.
        assert hidden.success < exposed.success - 0.1
        assert hidden.examples == exposed.examples
    assert plain.likelihood_ratio is None


def audit_of_two(workdir):
    return run_here(
        "audit",
        f"--workdir={workdir}",
        "--mechanisms=DP-SGD,DP-PowerSGD",
        "--nomembership",
        "--processes=1",
    )


@pytest.mark.slow
def test_program(tmp_path, monkeypatch, capfd):
    """Audits in a new process, which takes the system's entropy."""
    monkeypatch.setattr(mechanism, "SHORT", TINY)
    process, workdir = audit_of_two(tmp_path / "one"), tmp_path / "one"
    if process.returncode == 1:
        # One in a thousand bounds is wrong, as above.
        process, workdir = audit_of_two(tmp_path / "two"), tmp_path / "two"
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr + capfd.readouterr().err
    text = (workdir / "table.md").read_text("utf-8")
    assert "All claims hold." in text
    assert text in process.stdout
    assert "DP-PowerSGD: all claims hold, " in process.stdout
    written = json.loads((workdir / "audit.json").read_text("utf-8"))
    names = [r["mechanism"] for r in written["mechanisms"]]
    assert names == ["DP-SGD", "DP-PowerSGD"]
    assert (workdir / "audit.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "Expected --workdir, got none."),
        (["--workdir=x", "--mechanisms=DPSGD"], "DPSGD. Did you mean DP-SGD?"),
        (["--workdir=x", "--mechanisms="], "got none."),
        (["--workdir=x", "--shadow_models=3"], "four shadow models at least"),
    ],
)
def test_wrong_flags(flags, message):
    process = run_here("audit", *flags)
    assert process.returncode == 2
    assert message in process.stderr
    assert "Traceback" not in process.stderr
