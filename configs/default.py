"""The fields of a training config, with their defaults."""

import ml_collections
from ml_collections import config_dict


def get_config():
    """Makes the config that the files in `configs/` start from.

    A name is that of the library, as in `tf_dpsub.models.get`; `..._kwargs`
    are its further arguments. `None` leaves the choice to the library.

    Returns:
        A locked `ml_collections.ConfigDict`, which refuses unknown fields.

    Example:

    ```python
    from tf_dpsub.configs import default

    def get_config():
        config = default.get_config()
        config.dataset = "mnist"
        config.noise_multiplier = 4.0
        return config
    ```
    """
    config = ml_collections.ConfigDict()

    # Data: a name, or an .npz file with the arrays x_train, y_train, x_test and
    # y_test. The test split is taken to be public: it is evaluated without
    # noise after every epoch. Texts need a model with a tokenizer.
    config.dataset = "digits"
    config.data_dir = config_dict.placeholder(str)
    config.private_examples = config_dict.placeholder(int)
    config.public_examples = 0

    config.model = "mlp"
    config.model_kwargs = ml_collections.ConfigDict()

    # For the model "feature_classifier": arguments of
    # `tf_dpsub.models.image_features`. It takes public images as a public
    # subspace does: see below. "sentence_classifier" takes public texts: those
    # of `public_examples`, or of the lines of the file `public_data`.
    config.features = ml_collections.ConfigDict()

    # A .keras file with such a model, to start from its weights, such as that
    # of another run. They are taken as public: what they tell about private
    # examples the epsilon of this run does not cover.
    config.initial_weights = config_dict.placeholder(str)

    # Regular expressions of the paths of layers that are trained; none: all.
    config.trainable_layers = ()
    # Keras's LoRA: `rank`, and `include`, expressions of the paths of layers,
    # whose kernels are frozen then.
    config.lora = ml_collections.ConfigDict()
    # Arguments of `tf_dpsub.layers.reparametrize`, for the optimizer RGP.
    config.reparametrize = ml_collections.ConfigDict()

    # A private optimizer around one of Keras's.
    config.optimizer = "DPSGD"
    config.optimizer_kwargs = ml_collections.ConfigDict()
    config.inner_optimizer = "SGD"
    config.inner_optimizer_kwargs = ml_collections.ConfigDict()
    config.learning_rate = 0.1
    # "constant", "halfway" (a tenth of it in the second half of the steps), or
    # "linear" or "cosine", which end at 0.
    config.learning_rate_schedule = "constant"

    # The subspace in which the optimizer works, where it works in one. A public
    # one is found from `public_examples` of the data set; or, where
    # `public_data` is an .npz file, from so many of its images (0: all), made
    # to fit the model's input. Labels of images from a file are random, others
    # on demand: drawn anew whenever the subspace is found. A fixed one is read
    # from the .npz file that `subspace_kwargs` names as `basis`: the first
    # `rank` of its `directions` [parameters, n]. The first epoch is 1;
    # `ProjectedDPSGD` projects from `start_epoch` on.
    config.subspace = config_dict.placeholder(str)
    config.subspace_kwargs = ml_collections.ConfigDict()
    config.public_data = config_dict.placeholder(str)
    config.random_public_labels = False
    # The exponent of the scales of a public subspace: from 0 to 1, or "auto".
    config.whiten = config_dict.placeholder(object)
    config.start_epoch = 1

    # Privacy. `epsilon` is a budget, which a run that crosses it does not
    # start; where there is no noise multiplier, the smallest that keeps it is
    # taken. On the command line, either of both takes the other's place.
    config.l2_norm_clip = 1.0
    config.noise_multiplier = config_dict.placeholder(float)
    config.epsilon = config_dict.placeholder(float)
    config.delta = 1e-5
    config.accountant = "rdp"

    # "full_batch": the arguments of `tf_dpsub.heads.FullBatch` that
    # `recipe_kwargs` leaves out follow from the number of examples, epsilon and
    # delta. The optimizer, its rate and clip, the batch size and the number of
    # epochs are then those of the recipe, whatever this file says of them.
    config.recipe = config_dict.placeholder(str)
    config.recipe_kwargs = ml_collections.ConfigDict()

    # The expected batch size: what is drawn differs from step to step.
    config.batch_size = 128
    config.microbatch_size = config_dict.placeholder(int)
    config.epochs = 30

    # Of the split and of the initial weights. Noise and sampling take fresh
    # entropy, unless an experiment fixes it: the statement then says so.
    config.seed = 0
    config.fixed_noise_seed = config_dict.placeholder(int)

    # What is written down of gradients after epochs: "test_projection_error",
    # "test_projection_residual", "test_spectrum", and "private_spectrum", which
    # no epsilon covers. With "private_gradients", which none covers either, the
    # mean clipped gradients of steps are kept in the folder `gradients`, as
    # `private_gradients_kwargs` says: arguments of
    # `tf_dpsub.callbacks.PrivateGradientRecorder`.
    config.recorders = ()
    config.private_gradients_kwargs = ml_collections.ConfigDict()

    # Execution.
    config.dtype_policy = "float32"
    config.jit_compile = config_dict.placeholder(bool)
    config.steps_per_execution = 1
    # "none"; "mirrored": over all GPUs of the machine; "multi_worker": over the
    # processes, on one machine or several, that TF_CONFIG names. They share the
    # workdir.
    config.distribution = "none"
    return config.lock()
