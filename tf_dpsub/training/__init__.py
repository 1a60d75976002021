"""Private training: the model that Keras trains, and what happens in a step."""
