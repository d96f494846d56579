"""torch's plug-in points, from both sides: our rendezvous in torchrun (`torchrun --rdzv-backend=dlrover`, with
torchrun's own agent and workers), and plug-ins for torchrun in our launcher (`logs_specs`)."""
