"""What outlasts a step: checkpoints, training state, and the model made whole again on every rank.

From bottom to top: ``tensorfile`` and ``folder`` write and read, ``manifest`` says what is whole, ``saving``,
``loading`` and ``training`` know what goes in, ``agreement`` brings all ranks to one mind, ``keeper`` does
what the runtime is asked. Who trains which weight is left to ``stage``.
"""
