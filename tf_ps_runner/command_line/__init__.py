"""The command line of tf-ps-run, built from the same parts as that of dlrover-run."""
