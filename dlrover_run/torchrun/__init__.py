"""The rendezvous as a plug-in of torchrun: `torchrun --rdzv-backend=dlrover`, with torchrun's own agent and workers."""
