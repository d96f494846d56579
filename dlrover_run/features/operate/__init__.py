"""What an operator does with a running job, or with the event logs of one that is over."""
