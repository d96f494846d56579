"""What a GPU is needed for, in one program: hangs with NCCL, the time from a kill to the next step, the pause of a
checkpoint, the memory of the device after a kill, and jobs that only seem to hang. See `benchmarks/README.md`.

`--rehearse` runs the same program without a GPU, with gloo and the stand-ins of `device_lab`.
"""
