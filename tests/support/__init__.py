"""What the tests of several folders share: the ways to run a job, and readers of files, pages and screens."""
