"""The public name of `rtp_ext.measure.bench`."""

import sys

from rtp_ext.measure import bench

sys.modules[__name__] = bench
