"""Schedules, timelines, traces with figures, records, step logs, and a report of this machine's transports."""
