"""What all benchmarks share: runs, launchers, cases in turn, ratios, reports and pictures."""
