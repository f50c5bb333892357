"""The second phase of a conversion: all refusals, before a ring is created or a module is changed."""

from rtp_ext.convert.validation.call import members_of, read_call
from rtp_ext.convert.validation.model import validate

__all__ = ["members_of", "read_call", "validate"]
