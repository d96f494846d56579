"""Jobs whose throughput is a given function of their size, in virtual time, with two rules that choose the size."""
