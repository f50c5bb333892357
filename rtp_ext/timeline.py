"""The public name of `rtp_ext.observe.timeline`."""

import sys

from rtp_ext.observe import timeline

sys.modules[__name__] = timeline
