"""Compares this library with TensorFlow Privacy 0.9.0.

TensorFlow Privacy needs TensorFlow 2.15, hence a Python of its own:

    python -m tests.parity.compare --oracle .venv-parity/bin/python

Epsilon must agree within 1e-6 (relative), over the same Rényi orders. Where the
best order is a fraction, the dp-accounting that TensorFlow Privacy pins (0.4)
is exact, while dp-accounting 0.6 bounds an alternating series by its absolute
values: there ours may be larger by up to 2 %, but not smaller.

The update of a step must agree within 1e-5 where nothing is clipped and 2e-3
where it is: the clipping factor keeps a margin of 2^-10 for rounding, which is
a part of the privacy contract.
"""

import argparse
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import dp_accounting
import keras
import numpy as np
from dp_accounting.rdp.rdp_privacy_accountant import (
    DEFAULT_RDP_ORDERS as _DEFAULT_ORDERS,
)

import tf_dpsub
from tests.parity import oracle
from tf_dpsub.accounting import accountants

_EPSILON_TOLERANCE = 1e-6
_FRACTION_TOLERANCE = 2e-2
_EXACT_SETTINGS = 30
_STEP_TOLERANCE = {"no gradient clipped": 1e-5, "gradients clipped": 2e-3}


def our_epsilons(orders):
    """Yields two epsilons of each setting: of Poisson batches and of epochs."""
    for n, batch_size, noise_multiplier, epochs, delta in oracle.SETTINGS:
        count = oracle.step_count(n, batch_size, epochs)
        yield tuple(
            accountants.composed_epsilon(
                [
                    dp_accounting.SelfComposedDpEvent(
                        accountants.sampled_gaussian(noise_multiplier, rate),
                        times,
                    )
                ],
                delta=delta,
                accountant="rdp",
                orders=tried,
            )
            for rate, times, tried in (
                (batch_size / n, count, tuple(orders)),
                (1, epochs, tuple(_DEFAULT_ORDERS)),
            )
        )


def make_task():
    """Batch and initial weights for both libraries."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(16, 9, 9, 2)).astype(np.float32)
    y = generator.integers(0, 5, size=16)
    keras.utils.set_random_seed(0)
    model = oracle.build_model(keras)
    model.build(x.shape)
    weights = {f"w{i}": weight for i, weight in enumerate(model.get_weights())}
    return {"x": x, "y": y, **weights}


def our_steps(task):
    """Results of `oracle.steps` by this library."""
    result = {}
    for name, clip in oracle.CLIPS.items():
        plain = oracle.build_model(keras)
        plain.build(task["x"].shape)
        plain.set_weights([task[f"w{i}"] for i in range(len(plain.weights))])
        model = tf_dpsub.make_private(plain)
        model.compile(
            optimizer=tf_dpsub.optimizers.DPSGD(
                keras.optimizers.SGD(oracle.LEARNING_RATE),
                l2_norm_clip=clip,
                noise_multiplier=0.0,
                batch_size=len(task["x"]),
            ),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model.train_on_batch(task["x"], task["y"])
        result[name] = plain.get_weights()
    return result


def ask_oracle(python, task):
    """Runs `oracle` under another Python."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "task.npz"
        np.savez(path, **task)
        done = subprocess.run(
            [python, "-m", "tests.parity.oracle", str(path)],
            cwd=pathlib.Path(__file__).parents[2],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def epsilon_rows(theirs):
    """Yields (what, theirs, ours, error, allowed) for each epsilon."""
    exact = 0
    for setting, ours, poisson, order, once in zip(
        oracle.SETTINGS,
        our_epsilons(theirs["orders"]),
        theirs["poisson"],
        theirs["best_orders"],
        theirs["once_per_epoch"],
        strict=True,
    ):
        what = "n={} B={} σ={} epochs={} δ={:g}".format(*setting)
        error = ours[0] / poisson - 1
        allowed = _EPSILON_TOLERANCE
        if order % 1 and error > 0:
            allowed = _FRACTION_TOLERANCE
        else:
            exact += 1
        label = f"Poisson, order {order:g}, {what}"
        yield label, poisson, ours[0], abs(error), allowed
        error = abs(ours[1] / once - 1)
        label = f"once an epoch, {what}"
        yield label, once, ours[1], error, _EPSILON_TOLERANCE
    yield (
        "Poisson settings compared within 1e-6: how many must be, and are",
        _EXACT_SETTINGS,
        exact,
        max(0, 1 - exact / _EXACT_SETTINGS),
        0,
    )


def step_rows(theirs, task):
    """Yields (what, theirs, ours, error, allowed) for each update."""
    for name, weights in our_steps(task).items():
        start = [task[f"w{i}"] for i in range(len(weights))]
        ours, reference = (
            np.concatenate([np.ravel(a - b) for a, b in zip(end, start)])
            for end in (weights, map(np.asarray, theirs["steps"][name]))
        )  # [parameters]
        norm = np.linalg.norm(reference)
        yield (
            f"norm of a step's update, {name} (C={oracle.CLIPS[name]:g})",
            norm,
            np.linalg.norm(ours),
            np.linalg.norm(ours - reference) / norm,
            _STEP_TOLERANCE[name],
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--oracle",
        required=True,
        help="Python interpreter that has tensorflow-privacy 0.9.0.",
    )
    oracle_python = pathlib.Path(parser.parse_args().oracle).absolute()
    task = make_task()
    theirs = ask_oracle(oracle_python, task)
    failed = passed = 0
    print(f"{'':72}{'theirs':>12}{'ours':>12}{'error':>10}{'allowed':>10}")
    rows = itertools.chain(epsilon_rows(theirs), step_rows(theirs, task))
    for what, their, our, error, tolerance in rows:
        good = error <= tolerance
        passed, failed = passed + good, failed + (not good)
        print(
            f"{what:72}{their:12.6g}{our:12.6g}{error:10.1e}{tolerance:10.0e}"
            + ("" if good else "  FAILED")
        )
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
