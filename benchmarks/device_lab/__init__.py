"""A laboratory of hangs with the shape of a device, without one: jobs whose collectives are only enqueued, whose main
threads wait in C on the script's own line, and which answer as NCCL RAS does. See `device.c`."""
