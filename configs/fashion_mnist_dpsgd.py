"""DP-SGD on Fashion-MNIST in the setting of the PDP-SGD paper.

Reference:
    [Zhou, Wu, Banerjee: Bypassing the Ambient Dimension: Private SGD with
    Gradient Subspace Identification, ICLR 2021](
    https://arxiv.org/abs/2007.03813)
"""

from tf_dpsub.configs import default


def get_config():
    config = default.get_config()
    config.dataset = "fashion_mnist"
    config.private_examples = 10_000
    config.model = "mnist_cnn"
    # The paper's rate for noise multipliers 6 and 4. It has 0.01 for 10 and
    # more, and 0.05 for 2.
    config.learning_rate = 0.02
    config.l2_norm_clip = 1.0
    config.noise_multiplier = 4.0
    config.delta = 1e-5
    config.batch_size = 250
    config.epochs = 30
    return config
