"""Long tests in shards: `make test-long SHARD=1/8` (see tests/README.md)."""
