"""The fields of a training config, with their defaults."""

import ml_collections
from ml_collections import config_dict


def default_config():
    """Makes the config that the files in `configs/` start from.

    A name is that of the library, as in `tf_dpsub.models.get`; `..._kwargs`
    are its further arguments. `None` leaves the choice to the library.

    Returns:
        A locked `ml_collections.ConfigDict`, which refuses unknown fields.

    Example:

    ```python
    from launchers import train_config

    def get_config():
        config = train_config.default_config()
        config.dataset = "mnist"
        config.noise_multiplier = 4.0
        return config
    ```
    """
    config = ml_collections.ConfigDict()

    # Data. The test split is taken to be public: it is evaluated without noise
    # after every epoch.
    config.dataset = "digits"
    config.data_dir = config_dict.placeholder(str)
    config.private_examples = config_dict.placeholder(int)
    config.public_examples = 0

    config.model = "mlp"
    config.model_kwargs = ml_collections.ConfigDict()

    # A private optimizer around one of Keras's.
    config.optimizer = "DPSGD"
    config.optimizer_kwargs = ml_collections.ConfigDict()
    config.inner_optimizer = "SGD"
    config.inner_optimizer_kwargs = ml_collections.ConfigDict()
    config.learning_rate = 0.1
    # "constant", or "linear" or "cosine", which end at 0.
    config.learning_rate_schedule = "constant"

    # Privacy. `epsilon` is a budget, which a run that crosses it does not
    # start; where there is no noise multiplier, the smallest that keeps it is
    # taken. On the command line, either of both takes the other's place.
    config.l2_norm_clip = 1.0
    config.noise_multiplier = config_dict.placeholder(float)
    config.epsilon = config_dict.placeholder(float)
    config.delta = 1e-5
    config.accountant = "rdp"

    # The expected batch size: what is drawn differs from step to step.
    config.batch_size = 128
    config.microbatch_size = config_dict.placeholder(int)
    config.epochs = 30

    # Of the split and of the initial weights. Noise and sampling take fresh
    # entropy, unless an experiment fixes it: the statement then says so.
    config.seed = 0
    config.fixed_noise_seed = config_dict.placeholder(int)

    # Execution.
    config.dtype_policy = "float32"
    config.jit_compile = config_dict.placeholder(bool)
    config.steps_per_execution = 1
    # "none", or "mirrored": over all GPUs of the machine.
    config.distribution = "none"
    return config.lock()
