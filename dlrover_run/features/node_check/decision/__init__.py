"""The node check as a gate: records, one round, evidence, diagnosis, pairing and text. Pure."""
