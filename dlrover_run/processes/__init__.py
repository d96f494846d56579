"""The process supervisor: starts processes, reports their ends, and stops them with a signal, a grace period and a
kill. It holds no policy: callers decide what runs and what the end of a process means."""
