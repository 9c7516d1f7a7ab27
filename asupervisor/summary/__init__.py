"""The event file and the journal of one run."""
