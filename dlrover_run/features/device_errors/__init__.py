"""Errors of NVIDIA GPUs while workers run: what the driver reports of them goes into the cause of a worker's failure.

A process of its own (`process`) waits for Xid errors by NVML and reads the state of the GPUs when it is asked, so a
driver that is stuck stops that process and nothing else. `listener` is that process as the agent sees it. `explain`
decides, without a GPU, which error explains the end of a worker, and whether the node can go on; `node` connects them
with the rounds of a node. A machine without a device file of NVIDIA has none of this.
"""
