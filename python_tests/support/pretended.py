"""Hosts that are not there: ranks of one machine that take each other for ranks of several."""

import os


def pretend_hosts(rank: int, per_host: int) -> None:
    """Lets this process take part in rings of hosts with `per_host` ranks each. Before the ring is made."""
    os.environ["RTP_DEBUG_HOST"] = f"host {rank // per_host}"
