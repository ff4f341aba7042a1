"""Imported only by the workers' fork server.

It ends with the service, and its workers end with it. It ignores signals to the process group, so that
responses being graded can finish.
"""

import signal

from atoll.runtime.parent_death import die_with_parent

die_with_parent()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
