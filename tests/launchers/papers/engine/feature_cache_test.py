"""Features that are computed once and kept."""

import numpy as np

from tf_dpsub import data
from tf_dpsub.configs.best import digits
from tf_dpsub.launchers.papers.engine import feature_cache
from tf_dpsub.launchers.training import objects


def test_features_of_a_data_set_are_a_data_set(tmp_path):
    """Those that its model has, in a file that its owner alone reads."""
    config = digits.get_config()
    config.private_examples = 100
    file = tmp_path / "new" / "features.npz"
    feature_cache.write_npz(file, config)
    assert file.stat().st_mode & 0o777 == 0o600
    loaded, written = objects.dataset(config), data.load(str(file))
    # Training examples are drawn in another order.
    np.testing.assert_array_equal(
        np.sort(written.y_train), np.sort(loaded.y_train)
    )
    np.testing.assert_array_equal(written.y_test, loaded.y_test)
    model = objects.plain_model(config, loaded)
    head = model.layers[-1]
    np.testing.assert_allclose(
        head(written.x_test).numpy(),
        model.predict(loaded.x_test, verbose=0),
        rtol=1e-4,
        atol=1e-4,
    )
