"""Hangs and stragglers: found on a node, judged for the job, explained by stacks.

The records of a stall, in the order in which they are made:

| record | made by | what it says |
|---|---|---|
| `search.detector.Stalled` | the detector of a node, from samples | which workers make no progress, and since when |
| `search.suspects.Suspect` | the node, for each of them | where it is, and since when it has sent nothing |
| `node.diagnosis.Quiet` | `node.stall_watch` | all `Suspect`s of a node, with their stacks |
| `search.guilt.Finding` | the rules, from all suspects | which of them the others wait for, and why |
| `stalls.model.StallNodeReport` | one of several nodes, in its report | its suspects, and whether others of it train |
| `stalls.model.StallQuestion` | the coordinator | asks whether workers train while some are quiet |
| `stalls.model.StallFinding` | the coordinator | the `Finding` of a round, with the nodes and its number |
| `stalls.model.StallState`, `StallAssignment` | the coordinator | finding and question, in a plan and for a node |
| `node.stall_report.StallReport` | each node, once the cause is known | all of it for the user, with the stacks |

What is kept between two samples, and who owns it:

| state | owner |
|---|---|
| how long a pause may be, and the last progress | `search.detector.Detector`, for all workers and for each |
| the processor that workers have used lately, who has ended | `node.stall_watch.StallWatch` |
| the present stall: what was found, reported, asked and answered | `node.diagnosis.Diagnosis` |
| what a round leaves to the next one | `search.outside.LearnedPauses` |
| the marks that `status` shows | `WorkerRound.stalled`, set by `node.stall_response` |
"""
