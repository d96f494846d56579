"""Reports all that a worker can observe of its start."""

import os
import signal
import sys

from post import post

dispositions = {}
for number in signal.valid_signals():
    handler = signal.getsignal(number)
    if handler not in (signal.SIG_DFL, None):
        dispositions[int(number)] = getattr(handler, "__name__", str(handler))

post(
    environ=dict(os.environ),
    argv=sys.argv,
    orig_argv=sys.orig_argv,
    cwd=os.getcwd(),
    path0=sys.path[0],
    executable=sys.executable,
    unbuffered=sys.stdout.write_through,
    leads_session=os.getsid(0) == os.getpid(),
    leads_group=os.getpgid(0) == os.getpid(),
    stdin=os.readlink("/proc/self/fd/0"),
    fds=sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    dispositions=dispositions,
    name=__name__,
)
