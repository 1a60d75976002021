"""Private classifier of 8×8 digits, by the most accurate recipe: a head.

200 public digits scale the features. Set the privacy by
`--config.epsilon`: the number of steps, the rate and the noise follow from it.
"""

from tf_dpsub.configs import default


def get_config():
    config = default.get_config()
    config.dataset = "digits"
    config.public_examples = 200
    config.model = "feature_classifier"
    config.features = {
        "kinds": ("scattering",),
        "rank": 40,
        "whiten": 0.5,
        "seed": 0,
    }
    config.recipe = "full_batch"
    config.epsilon = 1.0
    config.delta = 1e-5
    return config
