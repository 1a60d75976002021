"""RGP on CIFAR-10 in the setting of its paper, at ε = 8.

WRN-28-4 with GroupNorm. Without data augmentation.

Reference:
    [Yu, Zhang, Chen, Yin, Liu: Large Scale Private Learning via Low-rank
    Reparametrization, ICML 2021](https://arxiv.org/abs/2106.09352)
"""

from tf_dpsub.configs import default


def get_config():
    config = default.get_config()
    config.dataset = "cifar10"
    config.model = "wrn28_4_gn"
    config.reparametrize = {"rank": 16, "exclude": ["input_conv", "logits"]}
    config.optimizer = "RGP"
    config.optimizer_kwargs = {"warmup_steps": 500}
    config.l2_norm_clip = 1.0
    # The paper's weight decay of 1e-4 goes through the momentum. Keras's does
    # not: 1 / (1 - 0.9) times as much shrinks the weights equally fast.
    config.inner_optimizer_kwargs = {"momentum": 0.9, "weight_decay": 1e-3}
    config.learning_rate = 0.5
    config.learning_rate_schedule = "halfway"
    config.epsilon = 8.0
    config.delta = 1e-5
    config.batch_size = 1000
    config.epochs = 200
    return config
