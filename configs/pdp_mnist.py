"""PDP-SGD on MNIST in the setting of its paper, at the largest noise.

The basis of the subspace comes from the gradients of 100 public examples, anew
at every step.

Reference:
    [Zhou, Wu, Banerjee: Bypassing the Ambient Dimension: Private SGD with
    Gradient Subspace Identification, ICLR 2021](
    https://arxiv.org/abs/2007.03813)
"""

from tf_dpsub.configs import default


def get_config():
    config = default.get_config()
    config.dataset = "mnist"
    config.private_examples = 10_000
    config.public_examples = 100
    config.model = "mnist_cnn"
    # The paper does not name the units: tf-dpsub reproduce tries both.
    config.model_kwargs = {"activation": "tanh"}
    config.optimizer = "ProjectedDPSGD"
    config.subspace = "PublicSubspace"
    config.subspace_kwargs = {"rank": 50, "method": "gram"}
    config.start_epoch = 1
    config.learning_rate = 0.1
    config.l2_norm_clip = 1.0
    config.noise_multiplier = 18.0
    config.delta = 1e-5
    config.batch_size = 250
    config.epochs = 30
    return config
