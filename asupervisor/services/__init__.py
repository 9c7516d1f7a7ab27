"""The standing background work of a supervised session."""
