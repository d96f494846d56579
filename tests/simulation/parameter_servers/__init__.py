"""Jobs with parameter servers in the simulation: TensorFlow processes, the tasks of an agent, and their invariants."""
