"""Workers that outlive their round, as an observer: a failure replaces the dead workers, and the others keep their
processes and form the next process group in place. Pure."""
