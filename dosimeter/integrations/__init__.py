"""Taps in federations: what leaves a client, and what reaches a server, is written as captures."""
