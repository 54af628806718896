"""Tensors between two processes of one host, past any communicator: small ones and large ones."""

from .link import MOST_BYTES, SENT, Arrival, Link, Sent

__all__ = ["MOST_BYTES", "SENT", "Arrival", "Link", "Sent"]
