"""The most accurate way to a private classifier of Fashion-MNIST: a head.

`--config.public_data=FILE` names an .npz file with `images`, uint8, of any
kind, some 2,000 of them, by which the features are scaled. Set the privacy by
`--config.epsilon`: the number of steps, the rate and the noise follow from it.
"""

from tf_dpsub.configs import default


def get_config():
    config = default.get_config()
    config.dataset = "fashion_mnist"
    config.model = "feature_classifier"
    config.features = {
        "kinds": ("scattering",),
        "rank": 1000,
        "seed": 0,
    }
    config.recipe = "full_batch"
    config.epsilon = 1.0
    config.delta = 1e-5
    return config
