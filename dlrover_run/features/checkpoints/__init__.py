"""The process that holds checkpoints in memory for the workers of a node, and writes them to the disk behind them."""
