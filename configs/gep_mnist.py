"""GEP on MNIST in the setting of its paper, at ε = 2.

Public images of another kind give the basis of the subspace, with random
labels, anew at every step: `--config.public_data=FILE` names an .npz file with
`images`, uint8. The paper takes 2,000.

Reference:
    [Yu, Zhang, Chen, Liu: Do Not Let Privacy Overbill Utility: Gradient
    Embedding Perturbation for Private Learning, ICLR 2021](
    https://arxiv.org/abs/2102.12677)
"""

from tf_dpsub.configs import default


def get_config():
    config = default.get_config()
    config.dataset = "mnist"
    config.model = "gep_mnist_cnn"
    config.optimizer = "GEP"
    config.optimizer_kwargs = {"residual_norm_clip": 2.0}
    config.l2_norm_clip = 10.0
    config.subspace = "PublicSubspace"
    config.subspace_kwargs = {"rank": 250, "groups": "layers"}
    config.random_public_labels = True
    # The paper's weight decay of 1e-4 goes through the momentum. Keras's does
    # not: 1 / (1 - 0.9) times as much shrinks the weights equally fast.
    config.inner_optimizer_kwargs = {"momentum": 0.9, "weight_decay": 1e-3}
    config.learning_rate = 0.1
    config.learning_rate_schedule = "halfway"
    config.epsilon = 2.0
    config.delta = 1e-5
    config.batch_size = 1000
    config.epochs = 50
    return config
