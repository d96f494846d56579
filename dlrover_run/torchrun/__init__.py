"""The rendezvous as a torchrun plug-in: `torchrun --rdzv-backend=dlrover`, with torchrun's own agent and workers."""
