"""What operators do with a running job: its status, drains, sizes, logs, stacks, and a web page.

A launch imports this module for the names of the subcommands, and `node`, which answers them on each node of a job by
`agent_socket`, with the records of `protocol`. A program that asks imports the rest: its `commands` find the job in
`jobs`, and show it by `display`. `web` has the page and the metrics of a master.
"""

SUBCOMMANDS = {
    "jobs": ("commands.running:jobs", "List the jobs on this machine: yours, and for root those of all users."),
    "status": ("commands.running:status", "Show the state of a running job and of each of its nodes."),
    "top": (
        "commands.running:top",
        "Show the status of a job until it ends or you press q: each second on a terminal, else after each change.",
    ),
    "why": (
        "commands.events:why",
        "Say why a job is in its state: why it waits, failed, was restarted, is slow, or was slow to start.",
    ),
    "events": ("commands.events:events", "List what happened in a job, from its event logs, also after its end."),
    "stacks": (
        "commands.running:stacks",
        "Show what all workers of a job do now: the calls of their main threads, equal ones once.",
    ),
    "logs": ("commands.logs:logs", "Print the latest output of the workers of a job, from any of its nodes."),
    "drain": (
        "commands.running:drain",
        "Ask one node to leave the job: its workers get the time to save, and a spare takes its place.",
    ),
    "stop": (
        "commands.running:stop",
        "Stop a job on all of its nodes. The workers get SIGTERM and the time of [b]--shutdown-timeout[/].",
    ),
    "scale": ("commands.scale:scale", "Change how many nodes of a running job train."),
}
"""The function of each, as `module:function` of this folder, and the first sentence of its help."""
