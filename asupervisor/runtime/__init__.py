"""Tasks and threads: the stop state, the host of a session, the device thread. Knows nothing of TensorFlow."""
