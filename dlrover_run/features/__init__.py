"""What dlrover-run has beyond starting workers again: a folder for each feature."""
