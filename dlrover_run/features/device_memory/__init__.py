"""The memory of a device is free before a worker starts: what an ended round has left behind with a device is ended
first (`node`), and what else holds the memory then is named (`users`). A machine without a device file of NVIDIA has
none of this.
"""
