"""Asyncio-native supervised sessions for TensorFlow graph training."""
