"""What every benchmark here shares: the machine, the sums, what memory is, and the report."""
