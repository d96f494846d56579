"""Reports itself and waits to be stopped."""

import signal

from post import post

post()
signal.pause()
