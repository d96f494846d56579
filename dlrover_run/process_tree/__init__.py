"""The watchdog, the process tree below it, and the orphans that must not outlive their owner."""
