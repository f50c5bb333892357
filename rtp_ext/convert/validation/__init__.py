"""The second phase of a conversion: every refusal, before a ring is made or anything is changed."""

from rtp_ext.convert.validation.call import read_call
from rtp_ext.convert.validation.model import validate

__all__ = ["read_call", "validate"]
