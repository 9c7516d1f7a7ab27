"""The only room that drives a TensorFlow session: run plans, the async session, its preparation."""
