"""Text: character-level translation, an LSTM that hands on its state."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, one_hot


def build():
    encoder_inputs = keras.Input((20, 40))
    encoder = layers.LSTM(64, return_state=True)
    _, state_h, state_c = encoder(encoder_inputs)
    decoder_inputs = keras.Input((25, 45))
    decoder_lstm = layers.LSTM(64, return_sequences=True, return_state=True)
    outputs, _, _ = decoder_lstm(
        decoder_inputs, initial_state=[state_h, state_c]
    )
    outputs = layers.Dense(45, activation="softmax")(outputs)
    return Script(
        keras.Model([encoder_inputs, decoder_inputs], outputs),
        "categorical_crossentropy",
        (one_hot(40, 64, 20), one_hot(45, 64, 25)),
        one_hot(45, 64, 25),
    )
