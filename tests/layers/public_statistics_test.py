import numpy as np
import pytest

from tf_dpsub.layers import PublicNormalization, PublicProjection


def _features(count, size, seed=0):
    generator = np.random.default_rng(seed)
    mixing = generator.standard_normal((size, size)) * 2.0 ** -np.arange(size)
    return (generator.standard_normal((count, size)) @ mixing.T + 3).astype(
        "float32"
    )


def test_normalization():
    public = _features(500, 6)
    public[:, 2] *= 100
    outputs = PublicNormalization.from_features(public)(public).numpy()
    np.testing.assert_allclose(outputs.mean(0), 0, atol=1e-5)
    assert np.median(np.linalg.norm(outputs, axis=1)) == pytest.approx(1, 1e-4)
    # All features count alike, but for the floor.
    deviations = public.std(0)
    floor = 0.1 * np.median(deviations)
    expected = deviations / np.sqrt(deviations**2 + floor**2)
    np.testing.assert_allclose(
        outputs.std(0) / outputs.std(0).max(),
        expected / expected.max(),
        rtol=1e-4,
    )


def test_features_that_hardly_vary_are_not_blown_up():
    public = _features(500, 6)
    public[:, 1] = 1 + 1e-6 * public[:, 1]
    outputs = PublicNormalization.from_features(public)(public).numpy()
    assert outputs[:, 1].std() < 1e-3 * outputs[:, 0].std()


@pytest.mark.parametrize("count, size", [(400, 8), (30, 50)])
@pytest.mark.parametrize("whiten", [0.0, 0.5, 1.0])
def test_projection(count, size, whiten):
    public = _features(count, size)
    layer = PublicProjection.from_features(public, 4, whiten=whiten)
    outputs = layer(public).numpy()
    centred = public - public.mean(0)
    _, singular, directions = np.linalg.svd(centred, full_matrices=False)
    variances = singular[:4] ** 2 / count
    expected = centred @ directions[:4].T
    expected *= (variances + 1e-3 * variances[0]) ** (-whiten / 2)
    expected /= np.median(np.linalg.norm(expected, axis=1))
    signs = np.sign((outputs * expected).sum(0))
    np.testing.assert_allclose(outputs, signs * expected, atol=2e-3)


def test_projection_of_the_whole_space_keeps_angles():
    public = _features(100, 5)
    layer = PublicProjection.from_features(public, 5, whiten=0.0)
    outputs, centred = layer(public).numpy(), public - public.mean(0)
    gram = centred @ centred.T
    np.testing.assert_allclose(
        outputs @ outputs.T / (outputs @ outputs.T).max(),
        gram / gram.max(),
        atol=1e-4,
    )


@pytest.mark.parametrize("kind", [PublicNormalization, PublicProjection])
@pytest.mark.parametrize(
    "features, message",
    [
        (np.zeros((3, 4, 5)), "shape"),
        (np.zeros((1, 4)), "at least two"),
        (np.full((5, 4), np.inf), "finite"),
        (np.ones((5, 4)), "differ"),
    ],
)
def test_errors(kind, features, message):
    arguments = (2,) if kind is PublicProjection else ()
    with pytest.raises(ValueError, match=message):
        kind.from_features(features, *arguments)


@pytest.mark.parametrize(
    "rank, whiten, message",
    [
        (5, 1.0, "rank <= 4"),
        (0, 1.0, "rank >= 1"),
        (2, 1.5, "0 <= whiten <= 1"),
        (2, np.nan, "0 <= whiten <= 1"),
    ],
)
def test_errors_of_projections(rank, whiten, message):
    with pytest.raises(ValueError, match=message):
        PublicProjection.from_features(_features(9, 4), rank, whiten=whiten)
