"""The node check: the machine is tried before it trains."""
