"""What people see of a job: its status and history, and what an operator asks of its workers. Nothing here decides."""
