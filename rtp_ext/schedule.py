"""The public name of `rtp_ext.observe.schedule`."""

import sys

from rtp_ext.observe import schedule

sys.modules[__name__] = schedule
