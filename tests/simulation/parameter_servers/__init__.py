"""Jobs with parameter servers in the simulation: processes of TensorFlow, the tasks of an agent, and their laws."""
