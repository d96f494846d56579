"""The health check as a policy: records, one round, evidence, diagnosis, pairing and text. Pure."""
