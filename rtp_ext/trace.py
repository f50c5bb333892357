"""The public name of `rtp_ext.observe.trace`."""

import sys

from rtp_ext.observe import trace

sys.modules[__name__] = trace
