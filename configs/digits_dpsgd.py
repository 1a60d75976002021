"""DP-SGD on scikit-learn's digits, which need no download, in a minute."""

from tf_dpsub.configs import default


def get_config():
    config = default.get_config()
    config.dataset = "digits"
    config.model = "mlp"
    config.model_kwargs = {"hidden": (128,), "activation": "tanh"}
    config.inner_optimizer = "SGD"
    config.inner_optimizer_kwargs = {"momentum": 0.9}
    config.learning_rate = 0.1
    config.l2_norm_clip = 1.0
    config.epsilon = 2.0
    config.delta = 1e-5
    config.batch_size = 256
    config.epochs = 30
    return config
