"""Private classifier of MNIST, by the most accurate recipe: a head.

Public images scale the features: those of a random process, "dead leaves",
which show nobody. `--config.public_data=FILE` names an .npz file with others,
about 2,000 of any kind, as `images`, uint8. Set the privacy by
`--config.epsilon`: the number of steps, the rate and the noise follow from it.
"""

from tf_dpsub.configs import default


def get_config():
    config = default.get_config()
    config.dataset = "mnist"
    config.model = "feature_classifier"
    config.public_data = "dead_leaves"
    config.features = {
        "kinds": ("scattering",),
        "rank": 1000,
        "seed": 0,
    }
    config.recipe = "full_batch"
    config.epsilon = 1.0
    config.delta = 1e-5
    return config
