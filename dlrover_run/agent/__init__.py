"""One node: the loop between the plan and the workers, and all that starting and stopping them takes."""
