"""Speed, side by side with TensorFlow's own classes: ``python -m tests.benchmarks``.

Every figure is a ratio of two things that were measured in the same process, turn by turn, because the machine's mood
changes faster than any benchmark runs. Absolute times are shown for orientation.
"""
