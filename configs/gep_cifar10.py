"""GEP on CIFAR-10 in the setting of its paper, at ε = 8.

ResNet-20 with GroupNorm, whose layers form five groups: input, three stages,
output. Public images of another kind give the basis of the subspace, with
random labels, anew at every step: `--config.public_data=FILE` names an .npz
file with `images`, uint8. The paper takes 2,000.

Reference:
    [Yu, Zhang, Chen, Liu: Do Not Let Privacy Overbill Utility: Gradient
    Embedding Perturbation for Private Learning, ICLR 2021](
    https://arxiv.org/abs/2102.12677)
"""

from tf_dpsub.configs import default


def get_config():
    config = default.get_config()
    config.dataset = "cifar10"
    config.model = "resnet20_gn"
    config.optimizer = "GEP"
    config.optimizer_kwargs = {"residual_norm_clip": 2.0}
    config.l2_norm_clip = 10.0
    config.subspace = "PublicSubspace"
    config.subspace_kwargs = {
        "rank": 1000,
        "groups": [
            ["input_conv", "input_norm"],
            *(_stage(stage) for stage in (1, 2, 3)),
            ["logits"],
        ],
    }
    config.random_public_labels = True
    # The paper's weight decay of 1e-4 goes through the momentum. Keras's does
    # not: 1 / (1 - 0.9) times as much shrinks the weights equally fast.
    config.inner_optimizer_kwargs = {"momentum": 0.9, "weight_decay": 1e-3}
    config.learning_rate = 0.1
    config.learning_rate_schedule = "halfway"
    config.epsilon = 8.0
    config.delta = 1e-5
    config.batch_size = 1000
    config.epochs = 200
    return config


def _stage(stage):
    """Names of the layers with weights in a stage of ResNet-20."""
    names = [
        f"stage{stage}_block{block}_{layer}"
        for block in (1, 2, 3)
        for layer in ("conv1", "norm1", "conv2", "norm2")
    ]
    if stage > 1:
        shortcut = f"stage{stage}_block1_shortcut"
        names += [f"{shortcut}_conv", f"{shortcut}_norm"]
    return names
