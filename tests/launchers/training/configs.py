"""Configs of tests."""

from tf_dpsub.configs import default


def changed(**changes):
    """The default config, with noise and with other changes."""
    config = default.get_config()
    for name, value in ({"noise_multiplier": 2.0} | changes).items():
        config[name] = value
    return config
