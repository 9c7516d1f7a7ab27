"""The checkpoint directory as a database: snapshot, writer, catalogue, retention."""
