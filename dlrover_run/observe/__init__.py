"""One look at the workers a tick: the progress page of each, the rhythm of its steps, what the kernel counts of it.

A room and not a feature: `features/hangs`, `features/autoscale`, `features/resources` and the report of activity are
made of its samples. `page` and `optimizer_steps` run in the worker too, and import the standard library alone.
"""
