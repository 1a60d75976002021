"""GEP on the features of a pretrained model: a linear classifier, at ε = 2.

`--config.dataset=FILE` names an .npz file with the features and labels
`x_train`, `y_train`, `x_test` and `y_test`. 2,000 of the training examples
serve as public data.

Reference:
    [Yu, Zhang, Chen, Liu: Do Not Let Privacy Overbill Utility: Gradient
    Embedding Perturbation for Private Learning, ICLR 2021](
    https://arxiv.org/abs/2102.12677)
"""

from tf_dpsub.configs import default


def get_config():
    config = default.get_config()
    config.dataset = "features.npz"
    config.public_examples = 2000
    config.model = "mlp"
    config.model_kwargs = {"hidden": ()}
    config.optimizer = "GEP"
    # A fifth of the other clip, as in the paper.
    config.optimizer_kwargs = {"residual_norm_clip": 0.2}
    config.l2_norm_clip = 1.0
    config.subspace = "PublicSubspace"
    config.subspace_kwargs = {"rank": 200}
    config.random_public_labels = True
    config.inner_optimizer = "Adam"
    config.learning_rate = 0.01
    config.epsilon = 2.0
    config.delta = 1e-5
    config.batch_size = 1000
    config.epochs = 20
    return config
