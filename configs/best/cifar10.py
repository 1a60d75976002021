"""Private classifier of CIFAR-10, by the most accurate recipe: a head.

Public images scale the features: `--config.public_data=FILE` names an .npz file
with about 2,000 of any kind, as `images`, uint8. Set the privacy by
`--config.epsilon`: the number of steps, the rate and the noise follow from it.
"""

from tf_dpsub.configs import default


def get_config():
    config = default.get_config()
    config.dataset = "cifar10"
    config.model = "feature_classifier"
    config.features = {
        "kinds": ("scattering", "patches"),
        "words": 400,
        "mirror": True,
        "rank": 1000,
        "whiten": 0.5,
        "seed": 0,
    }
    config.recipe = "full_batch"
    config.epsilon = 1.0
    config.delta = 1e-5
    return config
