"""Steps of a private head, on few random features."""

import numpy as np
import pytest

from tf_dpsub.launchers import papers
from tf_dpsub.launchers.papers import head_steps as study
from tf_dpsub.launchers.papers.engine import feature_cache, linear_heads

EXAMPLES, FEATURES, CLASSES = 200, 12, 3
KINDS = {kind.name: kind for kind in study.KINDS}
SETTING = study.Setting(rate=1.0, clip=0.05, value=None)


def _features(seed, count):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, FEATURES)).astype("float32")
    y = x[:, :CLASSES].argmax(1)
    # The first directions are the longest ones.
    return x * np.linspace(1, 0.3, FEATURES, dtype="float32"), y


class _Cache:
    """Features, as `feature_cache.FeatureCache` has them."""

    largest_rank = FEATURES

    def split(self, rank, whiten):
        (x, y), (x_test, y_test) = _features(0, EXAMPLES), _features(1, 100)
        return feature_cache.Split(
            x_train=x[:, :rank],
            y_train=y,
            x_test=x_test[:, :rank],
            y_test=y_test,
        )

    def public(self, rank, whiten):
        return _features(2, 50)[0][:, :rank]


@pytest.fixture(name="errors")
def _errors():
    errors = np.random.default_rng(3).normal(size=(EXAMPLES, CLASSES))
    errors -= errors.mean(1, keepdims=True)
    return errors.astype("float32")


@pytest.fixture(name="kernel")
def _kernel():
    shape = FEATURES, CLASSES
    return np.random.default_rng(4).normal(size=shape).astype("float32")


def _run(deviation=0.0, clip=1e6):
    cache = _Cache()
    return study._Run(
        cache.split(FEATURES, 0.5),
        cache.public(FEATURES, 0.5),
        np.float32(deviation),
        np.float32(clip),
        np.random.default_rng(0),
    )


def _mean(run, errors):
    return run.x.T @ errors / len(errors)


@pytest.mark.parametrize(
    "name, value",
    [
        ("public subspace", None),
        ("Wiener weights", None),
        ("GEP", 5),
        ("two-sided", 0.0),
    ],
)
def test_without_noise_and_clip_it_is_the_mean_gradient(
    name, value, errors, kernel
):
    run = _run()
    step = KINDS[name].step(run, errors, kernel, value)
    np.testing.assert_allclose(step, _mean(run, errors), rtol=1e-3, atol=1e-6)


def test_slopes_along_all_directions_make_up_the_gradient(errors, kernel):
    run = _run()
    count = 4000
    step = KINDS["zeroth order"].step(run, errors, kernel, count)
    mean = _mean(run, errors)
    # Of as many directions, the rest is as long as the root of 36 / 4,000.
    rest = np.linalg.norm(step - mean) / np.linalg.norm(mean)
    assert 0.03 < rest < 0.3


def test_directions_with_more_noise_than_signal_count_less(errors, kernel):
    errors *= 0
    errors[:, 0] = 1.0
    run = _run(deviation=0.3, clip=1.0)
    run.x[:] = 0.0
    run.x[:, 0] = 1.0
    plain = _run(deviation=0.3, clip=1.0)
    plain.x[:] = run.x
    for _ in range(30):
        weighted = KINDS["Wiener weights"].step(run, errors, kernel, None)
        step = KINDS["public subspace"].step(plain, errors, kernel, None)
    weights = weighted[:, 0] / step[:, 0]
    assert weights[0] > 0.5
    assert np.median(weights[1:]) < 0.4


@pytest.mark.parametrize(
    "name, value, releases",
    [
        ("public subspace", None, 1),
        ("GEP", 5, 2),
        ("zeroth order", 2, 1),
    ],
)
def test_no_example_moves_a_sum_by_more_than_its_noise_says(
    name, value, releases, errors, kernel
):
    """With the last example left out, in units of the clip."""
    clip = 0.01

    def total(count):
        run = _run(clip=clip)
        run.x = run.x[:count]
        # Noise is drawn in the same order, and is zero.
        step = KINDS[name].step(run, errors[:count], kernel, value)
        return step * count

    moved = total(EXAMPLES) - total(EXAMPLES - 1)
    if name == "zeroth order":
        # As long as its slopes, times the directions; clips are so much less.
        assert np.linalg.norm(moved) < 3 * clip * np.sqrt(kernel.size / value)
        return
    parts = np.split(moved, [value] if releases == 2 else [])
    lengths = [np.linalg.norm(part) for part in parts]
    assert max(lengths) <= clip * 1.001
    assert max(lengths) > 0.5 * clip


def test_one_gaussian_is_the_head_of_accuracy_by_epsilon():
    cache, point = _Cache(), study.Point(KINDS["public subspace"], 4.0)
    split = cache.split(FEATURES, 0.5)
    mine = study.simulate(split, None, point, SETTING, 20, 7)
    (theirs,) = linear_heads.simulate(
        split,
        [linear_heads.Setting(rate=1.0, clip=0.05, steps=20)],
        4.0,
        study._DELTA,
        [7],
    )
    assert mine == theirs["accuracy"]
    assert 0.4 < mine < 1.0


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_tuned_and_measured(name, monkeypatch):
    monkeypatch.setattr(study, "_RANK", 8)
    monkeypatch.setattr(study, "_RATES", (0.5, 1.0))
    monkeypatch.setattr(study, "_CLIPS", (0.05,))
    kind = KINDS[name]
    if name == "GEP":
        kind = study.dataclasses.replace(kind, values=(4, 6), start=4)
    result = study.run_point(_Cache(), study.Point(kind, 8.0), 10)
    assert len(result["accuracies"]) == len(study._SEEDS)
    assert min(result["accuracies"]) > 1 / CLASSES
    assert result["setting"]["value"] in kind.values
    assert "clip" in result["ends"]
    assert ("value" in result["ends"]) <= (len(kind.values) > 1)
    text = study.table(
        "T",
        [study.Point(kind, 8.0)],
        {f"epsilon8_{name}".replace(" ", "_"): result},
        "c",
    )
    assert f"| 8 | {name} |" in text


def test_it_needs_public_images(tmp_path):
    experiment = study.HeadSteps()
    with pytest.raises(ValueError, match="public_images"):
        experiment.run(
            tmp_path / experiment.name,
            experiment.points(),
            fraction=1,
            jobs=1,
            command="c",
            inputs=papers.Inputs(),
        )
