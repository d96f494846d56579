"""Where each worker is in its collectives: records, their sources, and the comparison of all ranks.

| module | what it has |
|---|---|
| `positions` | the record `Position`, which travels in a `Suspect` |
| `rank_sets` | the ranks of a group, as a short text |
| `compare` | pure: from the positions of all ranks to the ranks that the others wait for |
| `text` | pure: positions, as people read them |
| `evidence` | reads the positions of this node's workers, from the first source that has any |
| `ras_client` | asks the RAS threads of NCCL |
| `ras_report`, `ras_positions` | pure: what they answer, and the positions in it |
| `recorder_files` | has torch dump its flight recorder, and reads the dumps |
| `recorder` | pure: a dump, and the positions in it |
"""
