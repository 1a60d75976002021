"""PDP-SGD on Fashion-MNIST in the setting of its paper, at the largest noise.

The first half of the run is DP-SGD; from epoch 15 on, noisy gradients are
projected.

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
    config.public_examples = 100
    config.model = "mnist_cnn"
    # The paper does not name the units: tf-dpsub reproduce tries both.
    config.model_kwargs = {"activation": "tanh"}
    config.optimizer = "ProjectedDPSGD"
    config.subspace = "PublicSubspace"
    config.subspace_kwargs = {"rank": 70, "method": "gram"}
    config.start_epoch = 15
    config.learning_rate = 0.01
    config.l2_norm_clip = 1.0
    config.noise_multiplier = 18.0
    config.delta = 1e-5
    config.batch_size = 250
    config.epochs = 30
    return config
