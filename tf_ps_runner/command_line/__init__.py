"""The command line of tf-ps-run, made from the same parts as that of dlrover-run."""
