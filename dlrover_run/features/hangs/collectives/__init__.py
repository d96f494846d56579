"""Where each worker is in its collectives: records, their sources, and the comparison of all ranks.

| module | what it has |
|---|---|
| `positions` | the record `Position`, which travels in a `Suspect` |
| `rank_sets` | the ranks of a group, as a short text |
| `compare` | pure: from the positions of all ranks to the ranks that the others wait for |
"""
