"""The store by which the workers of a job form their process groups in place. An agent runs this folder by its path, in
the interpreter of the workers, in which this project may not be installed."""
