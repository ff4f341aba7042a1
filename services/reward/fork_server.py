"""Imported by the process that workers are forked from, before it forks any; by no other.

It ends with the service, and its workers end with it. Until then it goes on: who ends the service signals
the whole process group, and responses that are being graded have time to finish.
"""

import signal

from atoll.runtime.tether import die_with_parent

die_with_parent()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
