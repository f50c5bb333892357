"""Connections between ranks: their hosts, process groups and transports."""
