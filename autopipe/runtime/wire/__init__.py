"""What crosses between ranks, and who they are: edges, announcements, channels; groups, links, peers.

What is done with what arrives is left to ``stage``, in which order messages go to ``schedule``.
"""
