"""What a checkpoint holds with the weights: optimizers, objects with state, random streams, replicas.

The files are left to ``files``, bringing all ranks to one mind to ``agreement`` and ``save_load``.
"""
