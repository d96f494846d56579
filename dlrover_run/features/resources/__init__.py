"""What the workers of a node use: processors, memory and devices. It runs in the agent, never in a worker."""
