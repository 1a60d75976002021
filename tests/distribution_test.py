"""Several replicas, or workers, train as one device does.

Noise is drawn with a fixed seed, so that it is the same everywhere if it is
drawn once: all of what is released can be compared.
"""

import json

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tests import distributed_training, workers
from tests.distributed_training import (
    CLIP,
    DRAWN,
    EXAMPLES,
    MECHANISMS,
    RATE,
    STEPS,
    all_trained,
    trained,
)

pytestmark = pytest.mark.slow


def _output(out, err, code):
    assert code == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(name="one", scope="module")
def _one():
    """Results on one device, which needs no process of its own."""
    return all_trained("one")


@pytest.fixture(name="without_noise", scope="module")
def _without_noise():
    strategy = tf.distribute.get_strategy()
    results = trained(strategy, "DP-SGD", noise=0.0, seed=None, steps=1)
    return results["change"]


@pytest.fixture(name="mirrored", scope="module")
def _mirrored():
    with workers.alone(distributed_training.main, "mirrored") as process:
        return _output(*process.communicate(), process.returncode)


@pytest.fixture(name="of_workers", scope="module")
def _of_workers():
    """Results of each of two workers."""
    with workers.started(2, distributed_training.main, "workers") as processes:
        return [_output(*p.communicate(), p.returncode) for p in processes]


@pytest.fixture(name="several", params=["mirrored", "of_workers"])
def _several(request):
    results = request.getfixturevalue(request.param)
    return results[0] if isinstance(results, list) else results


@pytest.mark.parametrize("name", [*MECHANISMS, "own examples, in blocks"])
def test_train_as_one(name, one, several):
    """Every example is drawn (q = 1): sums over replicas are those of one."""
    alone, together = one[name], several[name]
    assert np.linalg.norm(alone["change"]) > 0.01
    np.testing.assert_allclose(
        together["change"], alone["change"], rtol=1e-4, atol=1e-5
    )
    assert together["steps"] == alone["steps"] == STEPS


@pytest.mark.parametrize("name", DRAWN)
def test_batches_together_are_those_of_one(name, one, several):
    """In an epoch, each row or person is in the batch of one replica."""
    _, _, steps, change = DRAWN[name]
    for results in (one[name], several[name]):
        assert results["steps"] == 2 * steps
        np.testing.assert_allclose(
            results["change"], 2 * change, rtol=1e-4, atol=1e-4
        )


def test_evaluate_and_predict_as_one(one, several):
    alone, together = one["DP-SGD"], several["DP-SGD"]
    for key in ("val_loss", "evaluated", "predicted"):
        np.testing.assert_allclose(
            together[key], alone[key], rtol=1e-4, atol=1e-6
        )
    assert together["evaluated"][0] == pytest.approx(together["val_loss"][-1])


def test_updates_read_public_values_alone(one, several):
    for results in (one, several):
        assert "a metric, say" in results["refused"]["why"]
        assert not any(results["refused"]["change"])


def noise_of(results, without_noise):
    """Noise of one step, in standard deviations."""
    added = np.subtract(results["with noise"]["change"], without_noise)
    return added / (RATE * 50 * CLIP / EXAMPLES)


def test_noise_is_that_of_one_draw(several, without_noise):
    """The key is one of the operating system."""
    noise = noise_of(several, without_noise)
    # 429 numbers: five standard deviations. Two draws would give 2.
    assert np.mean(noise**2) == pytest.approx(1, abs=0.35)
    assert stats.kstest(noise, "norm").pvalue > 1e-6


def test_every_run_draws_its_own_noise(
    one, mirrored, of_workers, without_noise
):
    runs = [
        noise_of(results, without_noise)
        for results in (one, mirrored, of_workers[0])
    ]
    correlations = np.corrcoef(runs) - np.eye(3)
    assert np.abs(correlations).max() < 5.5 / np.sqrt(len(runs[0]))


def test_workers_have_the_same_weights(of_workers):
    """Weights agree bit for bit, also where the chief alone has the key."""
    first, second = of_workers
    for name in first:
        assert first[name]["change"] == second[name]["change"], name
