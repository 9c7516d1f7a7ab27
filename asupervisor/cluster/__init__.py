"""Chief, workers and parameter servers that come and go."""
